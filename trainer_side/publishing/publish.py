"""An update from a source on every rank of a trainer, and what the sending rank does with every tensor of it.

Every rank of the trainer comes through here with the same source. One rank sends; the others take part in the source's
collectives, and learn how the update ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

import torch

from trainer_side.client.session import UpdateSession
from trainer_side.ranks.agreement import BEAT_S, Message, RankAgreement
from trainer_side.ranks.iterate import TensorSink, digests_of, iterate_in_step, touched
from trainer_side.sources.source import WeightSource
from updater.core.errors import Failure, LiveweightsError, Unavailable
from updater.protocol.answers import Receipt


class PushBackend(TensorSink, Protocol):
    """What the sending rank does between two agreements. A step is short, or returns None to be called again."""

    def prepare(self) -> Message | None:
        """Until tensors can be put."""

    def seal(self, failed: LiveweightsError | None) -> Message | None:
        """After the walk. Raises for `failed`, the first error of any rank, what the update then ended as."""

    def ended(self) -> Message | None:
        """The receipt of the committed update, as JSON. Raises what else it ended as."""

    def close(self, cause: BaseException | None = None) -> None:
        """Always at the end. What has not come to its own end by then is given up, because of `cause`."""


def publish(
    source: WeightSource, make: Callable[[Mapping[str, str]], PushBackend], *, team: RankAgreement | None = None
) -> Receipt:
    """Publish `source`: the receipt on every rank, or the same typed error on every rank.

    `make`: called on the sending rank with the digests that are known ahead.
    """
    team = team or RankAgreement(source.group)
    changed = team.agree(touched(source))
    if changed is not None:
        raise changed
    known = digests_of(source, team)
    with LeaderSteps(team, source.is_sender) as leading:
        leading.make(lambda: make(known))
        leading.step(lambda sending: sending.prepare())
        failed = iterate_in_step(source, leading.sending, team)
        try:
            leading.step(lambda sending: sending.seal(failed))
        except LiveweightsError as error:
            if failed is None:
                raise
            raise error from failed.__cause__  # known on the rank where it went wrong
        return leading.receipt()


def follow(make: Callable[[], PushBackend], is_sender: bool, team: RankAgreement) -> Receipt:
    """Publish what needs no walk any more, a folder that is whole: the receipt or the same error on every rank."""
    with LeaderSteps(team, is_sender) as leading:
        leading.make(make)
        leading.step(lambda sending: sending.seal(None))
        return leading.receipt()


class LeaderSteps:
    """The steps of one update on every rank: the sending one does them, the others learn what came of them."""

    def __init__(self, team: RankAgreement, is_sender: bool) -> None:
        self._team, self._is_sender = team, is_sender
        self.sending: PushBackend | None = None

    def make(self, make: Callable[[], PushBackend]) -> None:
        def made() -> Message:
            self.sending = make()
            return {}

        self._team.lead(made if self._is_sender else None)

    def step(self, step: Callable[[PushBackend], Message | None]) -> Message:
        sending = self.sending
        return self._team.lead(None if sending is None else (lambda: step(sending)))

    def receipt(self) -> Receipt:
        return Receipt.model_validate(self.step(lambda sending: sending.ended()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.sending is not None:
            self.sending.close(error)


class StepDeadline:
    """`timeout_s` in steps of at most BEAT_S."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    @property
    def beat_s(self) -> float:
        """How long the next step may wait; 0 when the time is over."""
        return min(BEAT_S, max(0.0, self._end - time.monotonic()))


class StreamPush:
    """Over a pushed transport. `session` has not begun."""

    def __init__(self, session: UpdateSession, timeout_s: float) -> None:
        self._session, self._deadline = session, StepDeadline(timeout_s)
        self._begun = False

    def prepare(self) -> Message | None:
        if not self._begun:
            self._session.begin()
            self._begun = True
        if self._session.offered(self._deadline.beat_s):
            self._session.open()
            return {}
        if not self._deadline.beat_s:
            raise self._session.abort(late("staging did not begin in time"))
        return None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._session.put(name, tensor)

    def seal(self, failed: LiveweightsError | None) -> Message:
        if failed is not None:
            raise self._session.failed(failed)
        self._session.seal()
        return {}

    def ended(self) -> Message | None:
        if self._session.ended(self._deadline.beat_s):
            return self._session.receipt().model_dump(mode="json")
        if not self._deadline.beat_s:
            raise late("the update has not ended in time; it goes on")
        return None

    def close(self, cause: BaseException | None = None) -> None:
        self._session.leave(cause)


def late(why: str) -> Unavailable:
    return Unavailable(Failure("unreachable", why))
