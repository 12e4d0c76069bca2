"""A source walked in lockstep, and what the sending rank does with every tensor of it.

Every rank of the trainer comes through here with the same source. One rank sends; the others take part in the source's
collectives to their end, whatever happens to the update, and learn how it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from trainer_side.lockstep import BEAT_S, Lockstep, Told
from trainer_side.session import UpdateSession
from trainer_side.weights import WeightSource
from updater.core.errors import Aborted, Failure, LiveweightsError, Unavailable, refuse
from updater.schemas import Receipt


class Taker(Protocol):
    """Takes a source's tensors, one by one. May raise LiveweightsError, and is given nothing more then."""

    def put(self, name: str, tensor: torch.Tensor) -> None: ...


def walk(source: WeightSource, taker: Taker | None, team: Lockstep) -> LiveweightsError | None:
    """Give every tensor to the taker (None on ranks that do not send). Returns what went wrong, the same on all ranks.

    The walk goes to its end in any case: the other ranks are inside the same collectives.
    """
    failed: LiveweightsError | None = None
    for name, tensor in source.tensors():
        if taker is None or failed is not None:
            continue
        try:
            if tensor is None:
                raise Aborted(Failure("internal", "the sending rank was not given it", tensor=name))
            taker.put(name, tensor)
        except LiveweightsError as error:
            failed = error
    return team.agree(failed or touched(source))


def touched(source: WeightSource) -> LiveweightsError | None:
    """`source_changed`, if an optimiser wrote to what is published."""
    try:
        source.check_untouched()
    except LiveweightsError as error:
        return Aborted(*error.failures)
    return None


def stream(
    source: WeightSource,
    open_session: Callable[[Mapping[str, str]], UpdateSession],
    *,
    team: Lockstep | None = None,
    timeout_s: float = 1800.0,
) -> Receipt:
    """Publish `source` over a pushed transport: the receipt on every rank, or the same typed error on every rank.

    `open_session`: called on the sending rank with the digests that are known ahead; what it returns has not begun.
    """
    team = team or Lockstep(source.group)
    changed = team.agree(touched(source))
    if changed is not None:
        raise changed
    known = source.digests()
    sending = _Sending(timeout_s) if source.is_sender else None
    try:
        team.lead(None if sending is None else (lambda: sending.make(lambda: open_session(known))))
        team.lead(None if sending is None else sending.begin)
        team.lead(None if sending is None else sending.offered)
        team.lead(None if sending is None else sending.open)
        failed = walk(source, sending, team)
        team.lead(None if sending is None else (lambda: sending.seal(failed)))
        return Receipt.model_validate(team.lead(None if sending is None else sending.ended))
    finally:
        if sending is not None:
            sending.close()


class _Sending:
    """What the sending rank does between two agreements: each step is short, or returns None to be called again."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s
        self._session: UpdateSession | None = None

    @property
    def session(self) -> UpdateSession:
        if self._session is None:
            raise refuse("wrong_phase", "the update has not begun")
        return self._session

    def make(self, open_session: Callable[[], UpdateSession]) -> Told:
        self._session = open_session()
        return {}

    def begin(self) -> Told:
        self.session.begin()
        return {}

    def offered(self) -> Told | None:
        if self.session.offered(self._beat()):
            return {}
        if not self._beat():
            raise self.session.abort(Unavailable(Failure("unreachable", "staging did not begin in time")))
        return None

    def open(self) -> Told:
        self.session.open()
        return {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self.session.put(name, tensor)

    def seal(self, failed: LiveweightsError | None) -> Told:
        if failed is not None:
            raise self.session.failed(failed)
        self.session.seal()
        return {}

    def ended(self) -> Told | None:
        if self.session.ended(self._beat()):
            return self.session.receipt().model_dump(mode="json")
        if not self._beat():
            raise Unavailable(Failure("unreachable", "the update has not ended in time; it goes on"))
        return None

    def close(self) -> None:
        """Left before its end, by an interrupt or a source that broke, the update is given up."""
        if self._session is not None:
            self._session.leave()

    def _beat(self) -> float:
        return min(BEAT_S, max(0.0, self._end - time.monotonic()))
