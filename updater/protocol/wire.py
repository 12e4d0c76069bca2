"""JSON to frozen dataclasses and back, checked by pydantic: the only way in for what came over a socket (I10)."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


class WireError(ValueError):
    """The bytes are not what the message type asks for. `where` is the path of the first bad field."""

    def __init__(self, kind: str, where: str, why: str) -> None:
        super().__init__(f"{kind}: field {where or '(top)'}: {why}")
        self.kind, self.where, self.why = kind, where, why


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter


def encode(message: Any) -> bytes:
    """A dataclass (enums, tuples, nested dataclasses) as JSON."""
    return _adapter(type(message)).dump_json(message)


def plain(message: Any) -> Any:
    """The same as JSON-ready Python values."""
    return _adapter(type(message)).dump_python(message, mode="json")


def decode(kind: type[T], data: bytes | str) -> T:
    """Raises WireError with the path of the first bad field."""
    return _checked(kind, lambda: _adapter(kind).validate_json(data))


def build(kind: type[T], data: Any) -> T:
    """The same from parsed JSON."""
    return _checked(kind, lambda: _adapter(kind).validate_python(data))


def _checked(kind: type[T], parse: Any) -> T:
    try:
        result: T = parse()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireError(getattr(kind, "__name__", str(kind)), where, first["msg"]) from None
    return result
