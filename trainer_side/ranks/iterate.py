"""A source walked by every rank of a trainer at once, so that none waits for one that has failed.

After each tensor all ranks say, in one small collective on the CPU, whether their source gave it. Where a rank's source
raised, all of them stop there with the same error. What cannot be interrupted here is a collective of the source itself
that such a rank never joined: then the others come back when the time-out of that collective's group lets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist

from trainer_side.client.causes import cause_of
from trainer_side.ranks.agreement import RankAgreement
from trainer_side.sources.source import WeightSource
from updater.core.errors import Aborted, Failure, LiveweightsError, Rejected


class TensorSink(Protocol):
    """Takes a source's tensors, one by one. Once it raised it is given nothing more."""

    def put(self, name: str, tensor: torch.Tensor) -> None: ...


class StepResult(IntEnum):
    """What a rank's source did when it was asked for the next tensor. The worst comes last."""

    GAVE = 0
    ENDED = 1
    FAILED = 2


def follows(error: LiveweightsError | None) -> bool:
    """Whether a source's failure may be another rank's: of a peer that is gone, or late in a collective, torch says no
    more than a RuntimeError.
    """
    if error is None:
        return False
    return (
        error.code == "peer_lost"
        or type(error.__cause__) is RuntimeError
        or isinstance(error.__cause__, dist.DistError)
    )


def digests_of(source: WeightSource, team: RankAgreement) -> Mapping[str, str]:
    """What is known ahead. Raises the same on every rank: nothing was begun yet."""
    known: Mapping[str, str] = {}
    failed: LiveweightsError | None = None
    try:
        known = source.digests()
    except Exception as error:
        failed = cause_of(error, kind=Rejected)
    failed = team.agree(failed, follows=follows(failed))
    if failed is not None:
        raise failed
    return known


def iterate_in_step(source: WeightSource, sink: TensorSink | None, team: RankAgreement) -> LiveweightsError | None:
    """Give every tensor to the sink (None on ranks that do not send). Returns what went wrong, the same on all ranks.

    What a sink raises does not end the walk: the source is sound, and was promised to be walked to its end. Raises
    `peer_lost` where a rank of the trainer is gone.
    """
    failed: LiveweightsError | None = None
    steps = _Steps(source, team)
    while (item := steps.next()) is not None:
        name, tensor = item
        del item  # or it would be in memory while the next one is gathered
        if sink is not None and failed is None:
            failed = _given(sink, name, tensor)
        del tensor
    if failed is None and steps.failed is not None:
        return team.agree(steps.failed, follows=follows(steps.failed))
    return team.agree(failed or touched(source))


def _given(sink: TensorSink, name: str, tensor: torch.Tensor | None) -> LiveweightsError | None:
    try:
        if tensor is None:
            raise Aborted(Failure("internal", "the sending rank was not given it", tensor=name))
        sink.put(name, tensor)
    except Exception as error:  # the other ranks would wait for this one until their group gives up
        return cause_of(error, tensor=name)
    return None


def touched(source: WeightSource) -> LiveweightsError | None:
    """`source_changed`, if an optimiser wrote to what is published."""
    try:
        source.check_untouched()
    except Exception as error:  # of any kind: all ranks have to learn it
        typed = Aborted(*cause_of(error).failures)
        typed.__cause__ = error
        return typed
    return None


class _Steps:
    """The tensors of a source, on all ranks in step. `failed`: why there are no more, on a rank that knows."""

    def __init__(self, source: WeightSource, team: RankAgreement) -> None:
        self._source, self._team = source, team
        self._names = iter(source.specs)  # what comes next, if the source keeps its word
        self._tensors: Iterator[tuple[str, torch.Tensor | None]] | None = None
        self.failed: LiveweightsError | None = None

    def next(self) -> tuple[str, torch.Tensor | None] | None:
        """None at the end, on all ranks at once. Raises `peer_lost`, or what broke this rank where both happened."""
        expected = next(self._names, "")
        item, result = self._asked(expected)
        try:
            best, worst = self._team.span(result)
        except Aborted as lost:
            raise self._both(lost) from lost.__cause__
        if best == worst == StepResult.GAVE:
            return item
        if worst == StepResult.ENDED != best and result is StepResult.ENDED:
            text = "its source has no more tensors where those of other ranks have"
            self.failed = Aborted(Failure("manifest_mismatch", text, tensor=expected))
        return None

    def _both(self, lost: Aborted) -> Aborted:
        """A rank is gone, and this source may have failed before that, or because of it."""
        if self.failed is None:
            return lost
        mine = self._team.placed(self.failed).failures
        return Aborted(*lost.failures, *mine) if follows(self.failed) else Aborted(*mine, *lost.failures)

    def _asked(self, expected: str) -> tuple[tuple[str, torch.Tensor | None] | None, StepResult]:
        try:
            if self._tensors is None:
                self._tensors = iter(self._source.tensors())
            item = next(self._tensors, None)
        except Exception as error:
            self.failed = _of_source(error, expected)
            return None, StepResult.FAILED
        return item, StepResult.ENDED if item is None else StepResult.GAVE


def _of_source(error: Exception, expected: str) -> Aborted:
    """An Aborted, since an update was under way, that names the tensor that was to come."""
    typed = cause_of(error)
    failures = [each if each.tensor or each.replica else replace(each, tensor=expected) for each in typed.failures]
    made = Aborted(*failures, live_version=typed.live_version, receipt=typed.receipt)
    made.__cause__ = error
    return made
