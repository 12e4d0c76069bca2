"""Every kind of source by the offer that names it, and what a receiving process keeps between updates."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from transports.base import Source
from transports.disk.source import DiskSource
from transports.stream import StreamReceiver, StreamSender, StreamSource
from updater.core.errors import refuse
from updater.core.participant import DiskOffer, Offer, StreamOffer
from updater.protocol import wire
from updater.protocol.manifest import Manifest


class Hub(Protocol):
    """One transport in one receiving process: it makes a receiver per update and keeps what outlives them."""

    def receiver(self, offer: StreamOffer, number: int) -> StreamReceiver:
        """`number`: which receiver of the offer this process is. Meets no sender yet."""

    def close(self) -> None: ...


class Transports:
    """Of one rank process."""

    def __init__(self) -> None:
        self._hubs: dict[str, Hub] = {}

    def open(self, offer: Offer, roots: tuple[str, ...], manifest: str, number: int) -> Source:
        """`roots`: for paths. `manifest`: JSON text, or empty to take what lies beside a path. `number`: which receiver
        of a stream this is. Raises LiveweightsError; whether an ambiguous folder will do is for the plan to say.
        """
        if isinstance(offer, DiskOffer):
            return DiskSource.open(offer.path, roots, manifest, allow_ambiguous=True)
        try:
            promised = Manifest.from_json(manifest)
        except wire.WireError as error:
            raise refuse("manifest_invalid", f"{error.where}: {error.why}") from None
        return StreamSource(offer.kind, promised, self._hub(offer.kind).receiver(offer, number))

    def close(self) -> None:
        for hub in self._hubs.values():
            hub.close()
        self._hubs.clear()

    def _hub(self, kind: str) -> Hub:
        if kind not in self._hubs:
            self._hubs[kind] = make_hub(kind)
        return self._hubs[kind]


#: kind -> (module, hub class, sender class); a module is loaded when its kind is first used.
_STREAMS = {
    "broadcast": ("transports.broadcast", "BroadcastHub", "BroadcastSender"),
    "shared_memory": ("transports.shared_memory", "SharedMemoryHub", "SharedMemorySender"),
    "cuda_ipc": ("transports.cuda_ipc", "CudaIpcHub", "CudaIpcSender"),
}


_OPTION = ConfigDict(strict=True, arbitrary_types_allowed=True)


def make_sender(kind: str, **options: Any) -> StreamSender:
    """The sender of a pushed transport. `options`: as its class takes them. Raises Rejected `transport_unsupported`,
    and `bad_request` for an option that the class does not take or a value that is none.
    """
    make = _class(kind, 2)
    _check_options(kind, make, options)
    sender: StreamSender = make(**options)
    return sender


def make_hub(kind: str) -> Hub:
    """What receives over a pushed transport in one process. Raises Rejected `transport_unsupported`."""
    hub: Hub = _class(kind, 1)()
    return hub


def _class(kind: str, which: int) -> Any:
    if kind not in _STREAMS:
        raise refuse("transport_unsupported", f"transport {kind!r} is none of disk, {', '.join(_STREAMS)}")
    try:
        return getattr(import_module(_STREAMS[kind][0]), _STREAMS[kind][which])
    except ImportError as error:
        raise refuse("transport_unsupported", f"transport {kind!r} cannot be used here: {error}") from None


def _check_options(kind: str, make: type, options: Mapping[str, Any]) -> None:
    """Against names and annotations of the class."""
    kinds = get_type_hints(make.__init__, include_extras=True)  # type: ignore[misc]
    kinds.pop("return")
    for name, value in options.items():
        if name not in kinds:
            hint = f"sender_options for {kind}: {', '.join(kinds)}"
            raise refuse("bad_request", f"{kind} takes no option {name!r}", hint=hint)
        try:
            TypeAdapter(kinds[name], config=_OPTION).validate_python(value)
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"]
            raise refuse("bad_request", f"{kind}, option {name}={value!r}: {why}") from None
