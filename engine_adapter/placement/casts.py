"""Which dtypes may meet: the tensor's and the parameter's."""

from __future__ import annotations

from enum import StrEnum

#: source -> parameter dtypes that hold every value of it. Eight-bit floats are absent: without their scales they are
#: not values, so a weight of that kind never widens quietly.
EXACT: dict[str, frozenset[str]] = {
    "F16": frozenset({"F32", "F64"}),
    "BF16": frozenset({"F32", "F64"}),
    "F32": frozenset({"F64"}),
    "I8": frozenset({"I16", "I32", "I64"}),
    "I16": frozenset({"I32", "I64"}),
    "I32": frozenset({"I64"}),
    "U8": frozenset({"I16", "I32", "I64", "U16", "U32", "U64"}),
    "U16": frozenset({"I32", "I64", "U32", "U64"}),
    "U32": frozenset({"I64", "U64"}),
}
#: Between these a cast is a rounding, or exact.
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


class Cast(StrEnum):
    SAME = "same"
    WIDEN = "widen"  # exact, and the way back gives the tensor's bytes
    NARROW = "narrow"  # loses bits: only if the policy names the pair
    NONE = "none"


def cast_between(source: str, parameter: str) -> Cast:
    """Safetensors names of both."""
    if source == parameter:
        return Cast.SAME
    if parameter in EXACT.get(source, ()):
        return Cast.WIDEN
    return Cast.NARROW if source in FLOATS and parameter in FLOATS else Cast.NONE
