"""The dtype that an engine holds each source tensor in, told in few words: layers and experts are alike.

A rule is (name with every number written as `#`, dtype), or a whole name where its number matters. The dtype is empty
for a tensor that feeds no parameter by a mere rounding: one that is quantised, kept derived, or read into several.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

Rules = tuple[tuple[str, str], ...]
_NUMBER = re.compile(r"\d+")


def compact(dtypes: Mapping[str, str]) -> Rules:
    """`dtypes`: tensor name -> safetensors dtype, or empty."""
    found: dict[str, set[str]] = {}
    for name, dtype in dtypes.items():
        found.setdefault(_NUMBER.sub("#", name), set()).add(dtype)
    alike = {pattern: held.copy().pop() for pattern, held in found.items() if len(held) == 1}
    apart = {name: dtype for name, dtype in dtypes.items() if _NUMBER.sub("#", name) not in alike}
    return tuple(sorted({**alike, **apart}.items()))


def merged(told: Iterable[Rules]) -> Rules:
    """Of the ranks of one replica; empty where they differ."""
    found: dict[str, str] = {}
    for rules in told:
        for name, dtype in rules:
            found[name] = dtype if found.get(name, dtype) == dtype else ""
    return tuple(sorted(found.items()))


def wanted(rules: Mapping[str, str], name: str) -> str | None:
    """What the rules say of a tensor; None where they say nothing."""
    return rules.get(name, rules.get(_NUMBER.sub("#", name)))


def fingerprint(rules: Iterable[tuple[str, str]]) -> str:
    """SHA-256 hex."""
    return hashlib.sha256("".join(f"{name} {dtype}\n" for name, dtype in sorted(rules)).encode()).hexdigest()


def differing(one: Rules, other: Rules) -> list[str]:
    """Rules that one of the two does not have."""
    return sorted({name for name, _ in set(one) ^ set(other)})
