"""The trainer's side: `push(weights, version)` and the client behind it.

May import `transports` and, of `updater`, only `core`, `protocol` and `ray`.
Must never know of engines. Names are loaded on first use, so that a client costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_side.client.client import AsyncClient, Client
    from trainer_side.client.handle import Hooks
    from trainer_side.client.session import AsyncUpdateSession, UpdateSession
    from trainer_side.publishing.pusher import Pusher, push, push_async
    from trainer_side.sources import as_source
    from updater.protocol.answers import Receipt

__all__ = [
    "AsyncClient",
    "AsyncUpdateSession",
    "Client",
    "Hooks",
    "Pusher",
    "Receipt",
    "UpdateSession",
    "as_source",
    "push",
    "push_async",
]

_HOMES = {
    "AsyncClient": "trainer_side.client.client",
    "AsyncUpdateSession": "trainer_side.client.session",
    "Client": "trainer_side.client.client",
    "Hooks": "trainer_side.client.handle",
    "Pusher": "trainer_side.publishing.pusher",
    "Receipt": "updater.protocol.answers",
    "UpdateSession": "trainer_side.client.session",
    "as_source": "trainer_side.sources",
    "push": "trainer_side.publishing.pusher",
    "push_async": "trainer_side.publishing.pusher",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
