"""What a front needs of whatever holds its ranks."""

from __future__ import annotations

from typing import Any, Protocol

from engine_adapter.rank.messages import Hello


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
