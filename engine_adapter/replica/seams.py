"""What a front needs of whatever holds its ranks and of whatever stands before its engine."""

from __future__ import annotations

from typing import Any, Protocol

from engine_adapter.rank.messages import Hello
from updater.core.errors import Failure
from updater.core.policy import InFlight


class Introduced(Protocol):
    """Whose ranks have said who they are."""

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """In rank order, once they are there."""


class Pool(Introduced, Protocol):
    """All ranks of one replica: `ranks.RankPool` started them, `vllm.pool.AttachedPool` found them."""

    async def call(self, verb: str, request: Any, *, deadline_s: float) -> list[Any]:
        """The same request (or one per rank, as a list) to all ranks; replies in rank order. Raises Aborted."""

    def cancel_staging(self, serial: int) -> None:
        """Tell every rank to give up what it stages for `serial`; the calls themselves then end as refused."""


class Admission(Protocol):
    """Who may start, who waits, and which version made which token: `admission.Gate`, `vllm.gate.VllmGate`.

    Shut at first. `close` and `open` come as the replica table says; labels of tokens come from the engine (I3).
    """

    mixed: int  # tokens refused because they would have mixed versions: must stay 0
    stale: bool  # whether new requests find cached blocks of before the last switch (`cache=keep`)

    @property
    def version(self) -> str:
        """Label of what is served."""

    @property
    def is_open(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    def close(self, mode: InFlight, pending: str) -> tuple[int, int]:
        """Shut. `pending`: label that may be published next. Returns how many requests were aborted and requeued."""

    async def quiesce(self, mode: InFlight, deadline_s: float) -> None:
        """Until the engine holds no request that the mode does not keep. Raises Aborted (`quiesce_timeout`)."""

    def before_switch(self, version: str) -> None:
        """The engine is about to run on `version`: end what asked for exactly another one."""

    def open(self, version: str) -> None:
        """Serve `version`: those that wait come in."""

    def break_down(self, failure: Failure) -> None:
        """The engine is gone or in doubt: all requests are told, none is let in any more."""

    def mend(self) -> None:
        """An audit found the replica in order again; shut until `open`."""
