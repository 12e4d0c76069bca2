"""A walk of one rank: what a source, its sink and the caller's own code may raise. Of several ranks:
tests/integration/test_push_causes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trainer_side.ranks.agreement import RankAgreement
from trainer_side.ranks.iterate import digests_of, follows, iterate_in_step
from trainer_side.sources.lora import Delta, LoraPart
from updater.core.errors import Aborted, Failure, LiveweightsError, Rejected
from updater.protocol.manifest import TensorSpec

NAMES = ("a", "b", "c")


class Source:
    """Three tensors. `broken`: what is raised in the place of the tensor with this index."""

    is_sender = True
    group = None
    ties: tuple[tuple[str, str], ...] = ()

    def __init__(self, broken: Mapping[int, Exception] | None = None, *, touched: Exception | None = None) -> None:
        self.specs = {name: TensorSpec(name, "F32", (1,)) for name in NAMES}
        self.broken, self.touched = broken or {}, touched
        self.given = 0

    def digests(self) -> Mapping[str, str]:
        if -1 in self.broken:
            raise self.broken[-1]
        return {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for at, name in enumerate(NAMES):
            if at in self.broken:
                raise self.broken[at]
            self.given += 1
            yield name, torch.ones(1)
        if len(NAMES) in self.broken:
            raise self.broken[len(NAMES)]

    def check_untouched(self) -> None:
        if self.touched is not None:
            raise self.touched


class Sink:
    def __init__(self, broken: Mapping[str, Exception] | None = None) -> None:
        self.names: list[str] = []
        self.broken = broken or {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.broken:
            raise self.broken[name]
        self.names.append(name)


def walked(source: Source, sink: Sink | None = None) -> LiveweightsError | None:
    return iterate_in_step(source, sink or Sink(), RankAgreement(None))


def test_every_tensor_is_given_in_order() -> None:
    sink = Sink()
    assert walked(Source(), sink) is None
    assert sink.names == list(NAMES)


@pytest.mark.parametrize(("at", "tensor"), [(0, "a"), (1, "b"), (2, "c"), (3, "")])
def test_what_a_source_raises_ends_the_walk_at_its_tensor(at: int, tensor: str) -> None:
    sink, broken = Sink(), OSError("gone")
    error = walked(Source({at: broken}), sink)
    assert isinstance(error, Aborted)
    assert [(failure.code, failure.tensor) for failure in error.failures] == [("rank_failed", tensor)]
    assert error.__cause__ is broken
    assert sink.names == list(NAMES[:at])


@pytest.mark.parametrize("kind", [Rejected, Aborted])
def test_a_sources_own_words_stay_and_an_update_was_under_way(kind: type[LiveweightsError]) -> None:
    told = (Failure("read_failed", "the disk", file="f"), Failure("tensor_missing", "", tensor="z"))
    error = walked(Source({1: kind(*told)}))
    assert isinstance(error, Aborted)
    assert [(each.code, each.tensor, each.file) for each in error.failures] == [
        ("read_failed", "b", "f"),
        ("tensor_missing", "z", ""),
    ]


def test_what_the_taker_raises_is_the_result_and_the_source_is_walked_to_its_end() -> None:
    broken, source = ValueError("the caller's own code"), Source()
    sink = Sink({"b": broken})
    error = walked(source, sink)
    assert error is not None
    assert [(failure.code, failure.tensor) for failure in error.failures] == [("rank_failed", "b")]
    assert error.__cause__ is broken
    assert (sink.names, source.given) == (["a"], len(NAMES))


def test_a_typed_refusal_of_the_taker_is_told_as_it_is() -> None:
    refused = Aborted(Failure("tensor_shape", "too small", tensor="a"))
    assert walked(Source(), Sink({"a": refused})) is refused


def test_a_program_that_is_ended_is_not_held_up() -> None:
    class Interrupted(Source):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        walked(Interrupted())


@pytest.mark.parametrize(
    ("touched", "code"),
    [(Rejected(Failure("source_changed", "", tensor="b")), "source_changed"), (OSError(), "rank_failed")],
)
def test_what_is_seen_after_the_walk_counts(touched: Exception, code: str) -> None:
    error = walked(Source(touched=touched))
    assert isinstance(error, Aborted)
    assert error.code == code


def test_digests_that_cannot_be_made_leave_everything_as_it_was() -> None:
    with pytest.raises(Rejected) as caught:
        digests_of(Source({-1: OSError()}), RankAgreement(None))
    assert caught.value.code == "rank_failed"
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("error", "second"),
    [
        (RuntimeError("Connection closed by peer"), True),
        (Aborted(Failure("peer_lost", "rank 1 did not take part")), True),
        (torch.OutOfMemoryError("out of memory"), False),  # a RuntimeError too
        (ValueError(), False),
    ],
)
def test_only_what_may_follow_from_another_ranks_failure_stands_back(error: Exception, second: bool) -> None:
    told = walked(Source({1: error}))
    assert follows(told) is second
    assert not follows(None)


# -- a tensor that is computed on the way


@dataclass
class Stub:
    """A part that says when it is gathered."""

    name: str
    log: list[str]
    value: Any

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, "F32", (2, 2))

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        return ()

    def share(self, sender: bool) -> int | None:
        return None

    def whole(self, sender: bool) -> torch.Tensor | None:
        self.log.append(self.name)
        return self.value if sender else None


class Full:
    """A tensor that there is no memory for a second time."""

    def clone(self) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("sender", [True, False])
def test_a_merge_takes_part_in_every_gather_before_it_needs_memory_of_its_own(sender: bool) -> None:
    """Or a sender without memory would leave the others in the gather of a factor."""
    log: list[str] = []
    delta = Delta(torch.ones(1), torch.ones(1), 1.0, False)
    factors = tuple(
        (delta, Stub(f"{at}.a", log, torch.ones(2, 2)), Stub(f"{at}.b", log, torch.ones(2, 2))) for at in "01"
    )
    part = LoraPart(TensorSpec("w", "F32", (2, 2)), Stub("w", log, Full()), factors)
    if sender:
        with pytest.raises(torch.OutOfMemoryError):
            part.whole(sender)
    else:
        assert part.whole(sender) is None
    assert log == ["w", "0.a", "0.b", "1.a", "1.b"]
