"""The rank agent: states, idempotence, all or nothing, nothing held after an update."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine_adapter.base import Derived
from engine_adapter.placement.atoms import make_cuts
from engine_adapter.placement.declared.rules import Rules, Target, declare
from engine_adapter.placement.rows import CopyRow, Placement
from engine_adapter.rank.agent import STAGING_VERBS, RankAgent
from engine_adapter.rank.messages import (
    RANK_MESSAGES,
    RankAudit,
    RankCheckPrevious,
    RankDigests,
    RankDiscard,
    RankInstall,
    RankInvalidate,
    RankPause,
    RankPlan,
    RankRestore,
    RankResume,
    RankStage,
    RankStatus,
    RankVerify,
)
from engine_adapter.rank.plan import dtypes_held
from engine_adapter.rank.spare import RankSpare
from engine_adapter.rank.state import DerivedStates, RankState
from engine_adapter.testing.bare import BareEngine, BareReplica
from engine_adapter.testing.small_models import checkpoint, manifest_of, replica
from transports.base import Box, Read, ReadReport
from transports.digest import tensor_digest, to_hex
from transports.testing import MemorySource, refused
from updater.core.errors import Aborted, Failure
from updater.core.participant import DiskOffer, Offer
from updater.core.policy import CachePolicy, InstallMode

MODES = [InstallMode.FLIP, InstallMode.EXCHANGE]


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.arange(5.0) + value}


class Rank:
    """One agent, its engine, and the sources it opened."""

    def __init__(self, value: float = 2.0, **options: Any) -> None:
        self.opened: list[MemorySource] = []
        self.tensors = weights(value)
        self.source: type[MemorySource] = MemorySource
        self.digests = True
        derived = options.pop("derived", ())
        self.engine = BareEngine({"a": (3, 4), "b": (5,)}, Rules(), dtypes=_F32, derived=derived)
        for name, tensor in weights(1.0).items():
            self.engine.bound[name].copy_(tensor)
        self.agent = RankAgent(self.engine, open_source=self._open, **options)

    def _open(self, offer: Offer, roots: tuple[str, ...], manifest: str, number: int) -> MemorySource:
        self.opened.append(self.source(self.tensors, manifest_of(self.tensors, self.digests)))
        return self.opened[-1]

    def plan(self, serial: int, **fields: Any) -> Any:
        return self.agent.plan(RankPlan(serial, DiskOffer("/x"), ("/",), "", **fields))

    def stage(self, serial: int = 1, **fields: Any) -> Any:
        """Up to the vote; answers the vote."""
        plan = self.plan(serial, **fields)
        self.agent.stage(RankStage(serial, 9.0))
        return self.agent.verify(RankVerify(serial, make_cuts(plan.tensors, [plan.boxes]), 9.0))

    def pause(self, serial: int = 1) -> Any:
        return self.agent.pause(RankPause(serial, 9.0))

    def install(self, serial: int = 1, attempt: int = 1, mode: InstallMode = InstallMode.FLIP) -> Any:
        return self.agent.install(RankInstall(serial, attempt, mode, f"0-{serial}", f"d{serial}", CachePolicy.RESET))

    def restore(self, serial: int = 1, attempt: int = 1) -> Any:
        return self.agent.restore(RankRestore(serial, attempt, "start", ""))

    def resume(self, serial: int = 1) -> Any:
        return self.agent.resume(RankResume(serial, 9.0))

    def update(self, serial: int = 1, mode: InstallMode = InstallMode.FLIP) -> None:
        self.stage(serial)
        self.pause(serial)
        self.install(serial, mode=mode)
        self.resume(serial)

    def holds(self, value: float) -> bool:
        return all(torch.equal(self.engine.bound[n], t) for n, t in weights(value).items())

    @property
    def state(self) -> tuple[str, int, str]:
        found = self.agent.status(RankStatus())
        return (found.spare_state, found.spare_serial, found.spare_version)

    @property
    def live(self) -> str:
        return self.agent.status(RankStatus()).live_version


@dataclass(eq=False)
class Made:
    """A state of `Head`."""

    copy: torch.Tensor


class Head:
    """A derived double-precision copy of `a`, which counts its builds."""

    def __init__(self, name: str = "head") -> None:
        self.derived = Derived(name, ("a",), self._build, self._bind, lambda: self._bound)
        self._bound = Made(weights(1.0)["a"].double())
        self._made: list[weakref.ref[Made]] = [weakref.ref(self._bound)]
        self.built, self.failures, self.broken = 0, 0, False

    @property
    def value(self) -> float:
        return self._bound.copy[0, 0].item()

    def alive(self) -> list[float]:
        """Of every state that somebody still holds."""
        found = [ref() for ref in self._made]
        return [made.copy[0, 0].item() for made in found if made is not None]

    def _build(self, tensors: Mapping[str, torch.Tensor]) -> object:
        if self.broken:
            raise ArithmeticError("no kernel for this")
        self.built += 1
        made = Made(tensors["a"].double())
        self._made.append(weakref.ref(made))
        return made

    def _bind(self, state: object) -> None:
        assert isinstance(state, Made)
        if self.failures and state is not self._bound:
            self.failures -= 1
            raise ArithmeticError("bind failed")
        self._bound = state


_F32 = {"a": torch.float32, "b": torch.float32}


def test_every_verb_is_handled_and_answers_its_type() -> None:
    rank = Rank()
    plan = RankPlan(1, DiskOffer("/x"), ("/",), "")
    replies: dict[str, Any] = {"plan": rank.agent.handle("plan", plan)}
    replies["stage"] = rank.agent.handle("stage", RankStage(1, 9.0))
    cuts = make_cuts(replies["plan"].tensors, [replies["plan"].boxes])
    replies["verify"] = rank.agent.handle("verify", RankVerify(1, cuts, 9.0))
    replies["pause"] = rank.agent.handle("pause", RankPause(1, 9.0))
    install = RankInstall(1, 1, InstallMode.AUTO, "0-1", "d", CachePolicy.RESET)
    replies["install"] = rank.agent.handle("install", install)
    replies["restore"] = rank.agent.handle("restore", RankRestore(1, 1, "start", ""))
    replies["install again"] = rank.agent.handle("install", replace(install, attempt=2))
    replies["invalidate"] = rank.agent.handle("invalidate", RankInvalidate(1, 2, CachePolicy.RESET))
    replies["resume"] = rank.agent.handle("resume", RankResume(1, 9.0))
    replies["status"] = rank.agent.handle("status", RankStatus())
    replies["audit"] = rank.agent.handle("audit", RankAudit("live"))
    replies["digests"] = rank.agent.handle("digests", RankDigests())
    replies["check_previous"] = rank.agent.handle("check_previous", RankCheckPrevious(2, "start", ""))
    replies["discard"] = rank.agent.handle("discard", RankDiscard(2))
    del replies["install again"]
    assert set(replies) == set(RANK_MESSAGES)
    assert all(isinstance(reply, RANK_MESSAGES[verb][1]) for verb, reply in replies.items())
    assert set(RANK_MESSAGES) >= STAGING_VERBS


@pytest.mark.parametrize("mode", MODES)
def test_states_along_an_update(mode: InstallMode) -> None:
    rank = Rank()
    assert (rank.state, rank.live) == (("empty", 0, ""), "start")
    rank.plan(1)
    assert rank.state == ("empty", 0, "")
    rank.agent.stage(RankStage(1, 9.0))
    assert (rank.state, rank.holds(1.0)) == (("staging", 1, ""), True)
    vote = rank.stage(1)
    assert (rank.state, rank.holds(1.0)) == (("staged", 1, ""), True)
    assert rank.opened[-1].closed  # I6: a staged update may wait for long
    assert vote.changed == ("a", "b")
    assert rank.pause().staged_serial == 1
    rank.install(mode=mode)
    assert (rank.state, rank.live, rank.holds(2.0)) == (("previous", 0, "start"), "0-1", True)
    rank.resume()
    assert not rank.engine.paused
    assert all(source.closed for source in rank.opened)


def test_the_label_changes_while_paused_and_after_the_bytes() -> None:
    """I3: a client that reads the label reads the bytes it names."""
    rank = Rank()
    seen: list[bool] = []
    rank.engine.before_label = lambda _version: seen.append(rank.holds(2.0) and rank.engine.paused)
    rank.update()
    assert seen == [True]
    assert rank.engine.calls == ["pause", "label 0-1", "unpause"]


def test_planning_spends_nothing() -> None:
    rank = Rank()
    rank.update()
    rank.tensors = {"a": torch.zeros(9), "b": torch.zeros(5)}
    with refused("tensor_shape", tensors=["a"]):
        rank.plan(2)
    assert rank.state == ("previous", 0, "start")
    assert rank.opened[-1].closed
    rank.tensors = weights(3.0)
    rank.plan(3)
    for serial in (3, 0):  # 0: the number of the start replay
        rank.agent.discard(RankDiscard(serial))
        assert rank.state == ("previous", 0, "start")
    assert rank.opened[-1].closed


def test_staging_spends_previous_and_discard_empties() -> None:
    rank = Rank()
    rank.update()
    rank.stage(2)
    assert rank.state == ("staged", 2, "")
    with refused("no_rollback"):
        rank.agent.check_previous(RankCheckPrevious(3, "start", ""))
    rank.agent.discard(RankDiscard(1))
    assert rank.state == ("staged", 2, "")
    rank.agent.discard(RankDiscard(2))
    assert (rank.state, rank.holds(2.0)) == (("empty", 0, ""), True)
    with refused("wrong_phase"):
        rank.install(2)


@pytest.mark.parametrize("mode", MODES)
def test_rollback_and_forward_again(mode: InstallMode) -> None:
    rank = Rank()
    rank.update(mode=mode)
    rank.agent.check_previous(RankCheckPrevious(2, "start", "x"))
    assert rank.pause(2).staged_serial == 2
    rank.agent.install(RankInstall(2, 1, mode, "start", "x", CachePolicy.RESET))
    rank.resume(2)
    assert (rank.holds(1.0), rank.live, rank.state) == (True, "start", ("previous", 0, "0-1"))
    with refused("no_rollback"):
        rank.agent.check_previous(RankCheckPrevious(3, "0-1", "other"))
    rank.agent.check_previous(RankCheckPrevious(3, "0-1", "d1"))


def test_a_spoilt_previous_is_no_way_back() -> None:
    rank = Rank()
    rank.update()
    rank.agent.spare.spare["b"][2] += 1
    with refused("no_rollback"):
        rank.agent.check_previous(RankCheckPrevious(2, "start", ""))
    assert rank.state == ("empty", 0, "")
    with refused("wrong_phase"):
        rank.pause(2)
        rank.install(2)


def test_repeated_verbs_have_one_effect() -> None:
    """I7."""
    rank = Rank()
    plan = rank.plan(1)
    assert rank.plan(1) is plan
    assert len(rank.opened) == 1
    first = rank.agent.stage(RankStage(1, 9.0))
    assert rank.agent.stage(RankStage(1, 9.0)) is first
    verify = RankVerify(1, make_cuts(plan.tensors, [plan.boxes]), 9.0)
    assert rank.agent.verify(verify) is rank.agent.verify(verify)
    assert rank.pause() == rank.pause()
    rank.install()
    rank.install()
    assert rank.holds(2.0)
    rank.resume()
    rank.resume()
    rank.install()
    assert rank.holds(2.0)
    assert rank.engine.calls == ["pause", "label 0-1", "unpause"]


def test_the_numbers_of_an_older_coordinator_do_not_answer_for_a_new_update() -> None:
    rank = Rank()
    rank.update(1)
    rank.tensors = weights(5.0)
    rank.update(1)
    assert rank.holds(5.0)


def test_a_plan_whose_source_was_let_go_is_made_again() -> None:
    rank = Rank()
    rank.stage()
    rank.pause()
    rank.install()
    rank.restore()
    rank.resume()
    rank.tensors = weights(4.0)  # the same path holds other bytes now
    rank.stage()
    rank.pause()
    rank.install()
    assert (rank.holds(4.0), len(rank.opened)) == (True, 2)


@pytest.mark.parametrize("mode", MODES)
def test_restore_takes_back_once(mode: InstallMode) -> None:
    rank = Rank()
    rank.stage()
    rank.pause()
    rank.install(mode=mode)
    rank.restore()
    rank.restore()
    assert (rank.holds(1.0), rank.live, rank.state) == (True, "start", ("staged", 1, ""))
    with refused("replica_fenced"):
        rank.install(mode=mode)
    rank.install(attempt=2, mode=mode)
    rank.resume()
    assert rank.holds(2.0)
    with refused("wrong_phase"):
        rank.restore(attempt=2)


def test_restore_before_a_late_install_forbids_it() -> None:
    rank = Rank()
    rank.stage()
    rank.pause()
    rank.restore()
    with refused("replica_fenced"):
        rank.install()
    assert rank.holds(1.0)


def test_restore_of_another_attempt_does_nothing() -> None:
    rank = Rank()
    rank.stage()
    rank.pause()
    rank.install(attempt=2)
    rank.restore(attempt=1)
    assert rank.holds(2.0)


class Broken(Exception):
    pass


def raising(times: int) -> Any:
    left = [times]

    def hook(_name: str) -> None:
        if left[0]:
            left[0] -= 1
            raise Broken

    return hook


@pytest.mark.parametrize("where", ["before_rebind", "before_label"])
def test_a_failed_install_is_taken_back_at_once(where: str) -> None:
    rank = Rank()
    rank.stage()
    rank.pause()
    setattr(rank.engine, where, raising(1))
    with refused("rank_failed"):
        rank.install()
    assert (rank.holds(1.0), rank.live, rank.state) == (True, "start", ("staged", 1, ""))
    rank.resume()


def test_a_failed_install_that_cannot_be_taken_back_keeps_the_rank_shut_until_restored() -> None:
    rank = Rank()
    rank.stage()
    rank.pause()
    calls: list[str] = []

    def second_and_third(name: str) -> None:
        calls.append(name)
        if len(calls) in (2, 3):
            raise Broken

    rank.engine.before_rebind = second_and_third
    with refused("rank_failed"):
        rank.install()
    assert rank.state[0] == "unknown"
    with refused("wrong_phase"):
        rank.resume()
    assert rank.engine.paused
    rank.restore()
    assert (rank.holds(1.0), rank.state) == (True, ("staged", 1, ""))
    rank.resume()


@pytest.mark.case("B072")
@pytest.mark.parametrize("mode", MODES)
def test_derived_values_follow_install_and_restore(mode: InstallMode) -> None:
    head = Head()
    rank = Rank(derived=(head.derived,))
    rank.stage()
    assert (head.value, head.built) == (1.0, 1)  # the engine still serves the old one
    rank.pause()
    seen: list[float] = []
    rank.engine.before_label = lambda _version: seen.append(head.value)
    rank.install(mode=mode)
    rank.restore()
    assert (seen, head.built) == ([2.0, 1.0], 1)  # before the new label is visible, and nothing built while paused


@pytest.mark.parametrize("mode", MODES)
def test_derived_values_follow_a_rollback_without_being_built_again(mode: InstallMode) -> None:
    head = Head()
    rank = Rank(derived=(head.derived,))
    rank.update(mode=mode)
    rank.agent.check_previous(RankCheckPrevious(2, "start", ""))
    rank.pause(2)
    rank.install(2, mode=mode)
    rank.resume(2)
    assert (head.value, head.built, rank.holds(1.0)) == (1.0, 1, True)
    rank.tensors = weights(3.0)
    rank.update(3, mode)
    assert (head.value, head.built) == (3.0, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_bind_that_fails_in_the_middle_is_undone_with_the_bytes(mode: InstallMode) -> None:
    first, second = Head("first"), Head("second")
    second.failures = 1
    rank = Rank(derived=(first.derived, second.derived))
    rank.stage()
    rank.pause()
    with refused("rank_failed"):
        rank.install(mode=mode)
    assert (first.value, second.value, rank.holds(1.0)) == (1.0, 1.0, True)
    assert rank.state == ("staged", 1, "")
    rank.install(attempt=2, mode=mode)
    assert (first.value, second.value, rank.holds(2.0)) == (2.0, 2.0, True)


def test_a_build_that_fails_refuses_the_vote_and_names_the_layer() -> None:
    head = Head()
    rank = Rank(derived=(head.derived,))
    head.broken = True
    with refused("rank_failed", tensors=["head"]):
        rank.stage()
    with refused("wrong_phase"):
        rank.pause()
        rank.install()
    rank.resume()
    rank.agent.discard(RankDiscard(1))
    assert (head.value, rank.holds(1.0), rank.state[0]) == (1.0, True, "empty")
    head.broken = False
    rank.update(2)
    assert head.value == 2.0


def test_a_new_staging_spends_the_derived_values_of_the_previous_version() -> None:
    head = Head()
    rank = Rank(derived=(head.derived,))
    rank.update()
    rank.tensors = weights(3.0)
    rank.plan(2)
    assert rank.agent.check_previous(RankCheckPrevious(2, "start", ""))
    rank.agent.stage(RankStage(2, 9.0))
    assert head.alive() == [2.0]


@pytest.mark.case("B072")
def test_derived_values_without_a_hook_or_a_parameter_are_refused_when_a_rank_joins() -> None:
    head = Head()
    with refused("placement_refused", tensors=["head"]):
        Rank(derived=(replace(head.derived, build=None),))  # type: ignore[arg-type]
    with refused("placement_refused", tensors=["head"]):
        Rank(derived=(replace(head.derived, feeds=("nothing",)),))


def test_moved_memory_between_vote_and_pause_is_refused_and_not_paused() -> None:
    rank = Rank()
    rank.stage()
    spare = rank.agent.spare
    kept = spare._sides[1]["a"]
    spare._sides[1]["a"] = kept.clone()
    with refused("rank_failed"):
        rank.pause()
    assert not rank.engine.paused
    spare._sides[1]["a"] = kept
    assert rank.pause().staged_serial == 1


def test_freed_memory_is_reported_as_sleep() -> None:
    rank = Rank()
    rank.stage()
    rank.engine.bound["a"].untyped_storage().resize_(0)
    assert rank.pause().asleep


def test_an_unknown_update_is_refused_or_answered() -> None:
    rank = Rank()
    for verb, request in (("stage", RankStage(7, 9.0)), ("verify", RankVerify(7, (), 9.0))):
        with refused("wrong_phase"):
            rank.agent.handle(verb, request)
    assert rank.pause(7).staged_serial == 0
    with refused("wrong_phase"):
        rank.install(7)
    rank.resume(7)
    rank.agent.discard(RankDiscard(7))


def test_installing_needs_the_pause_and_the_vote() -> None:
    rank = Rank()
    rank.plan(1)
    rank.agent.stage(RankStage(1, 9.0))
    rank.pause()
    with refused("wrong_phase"):
        rank.install()
    rank.resume()
    rank.stage(1)
    with refused("wrong_phase"):
        rank.install()
    with refused("wrong_phase"):
        rank.agent.invalidate(RankInvalidate(1, 1, CachePolicy.RESET))


def test_a_pause_that_times_out_is_refused() -> None:
    rank = Rank()

    def never(deadline_s: float) -> Any:
        raise TimeoutError(deadline_s)

    rank.engine.pause = never  # type: ignore[method-assign]
    with refused("quiesce_timeout"):
        rank.pause()
    assert not rank.agent.status(RankStatus()).paused


class Blocking(MemorySource):
    """Waits in `read` until it is told to stop."""

    begun = threading.Event()

    def read(self, reads: Sequence[Read], **callbacks: Any) -> ReadReport:
        self.begun.set()
        turn = threading.Event()
        while not callbacks["should_stop"]():
            turn.wait(0.001)
        return super().read(reads, **callbacks)


def test_discard_ends_a_running_stage() -> None:
    rank = Rank()
    rank.source = Blocking
    Blocking.begun = threading.Event()
    rank.plan(1)
    failures: list[Failure] = []

    def work() -> None:
        try:
            rank.agent.stage(RankStage(1, 60.0))
        except Aborted as error:
            failures.extend(error.failures)

    thread = threading.Thread(target=work)
    thread.start()
    assert Blocking.begun.wait(30)
    rank.agent.discard(RankDiscard(1))
    thread.join(30)
    assert [failure.code for failure in failures] == ["client_abort"]
    assert (rank.state, rank.opened[0].closed) == (("empty", 0, ""), True)


def test_a_late_stage_ends_at_its_deadline() -> None:
    """I9, on a clock of the test's."""
    now = [0.0]
    rank = Rank(clock=lambda: now.__setitem__(0, now[0] + 1.0) or now[0])  # type: ignore[func-returns-value]
    rank.plan(1)
    with refused("phase_timeout"):
        rank.agent.stage(RankStage(1, 2.5))
    rank.agent.discard(RankDiscard(1))
    assert rank.state == ("empty", 0, "")


class Changing(MemorySource):
    def recheck(self) -> None:
        raise Aborted(Failure("source_changed", "it is another file now"))


def test_a_source_that_changed_while_being_read_is_refused() -> None:
    rank = Rank()
    rank.source = Changing
    rank.plan(1)
    with refused("source_changed"):
        rank.agent.stage(RankStage(1, 9.0))


def test_a_vote_does_not_outlive_the_bytes_it_was_about() -> None:
    """I2: the spare was voted for update 1; then update 2 wrote into it and failed."""
    rank = Rank()
    rank.stage(1)
    rank.source = Changing
    rank.plan(2)
    with refused("source_changed"):
        rank.agent.stage(RankStage(2, 9.0))
    assert rank.pause(1).staged_serial == 0
    with refused("wrong_phase"):
        rank.install(1)
    assert rank.holds(1.0)


@pytest.mark.parametrize("size", [1, 2])
def test_recorded_digests_are_those_of_whole_parameters(size: int) -> None:
    """Also of fused ones, that several whole tensors feed."""
    made = replica(checkpoint(1), size)
    made.update(1, "0-1")
    for agent in made.agents:
        found = agent.audit(RankAudit("live"))
        assert (found.checked, found.mismatched) == (9, ())
    made.check_previous(2, "start", "")


def test_audit_of_both_sides() -> None:
    rank = Rank()
    assert rank.agent.audit(RankAudit("live")).checked == 0
    rank.update()
    assert rank.agent.audit(RankAudit("live")).mismatched == ()
    assert rank.agent.audit(RankAudit("spare")).mismatched == ()
    rank.engine.bound["b"][0] += 1
    rank.agent.spare.spare["a"][0] += 1
    assert rank.agent.audit(RankAudit("live")).mismatched == ("b",)
    assert rank.state[0] == "previous"
    assert rank.agent.audit(RankAudit("spare")).mismatched == ("a",)
    assert rank.state[0] == "empty"


def test_an_audit_ends_when_another_verb_waits_for_its_thread() -> None:
    waits = False
    rank = Rank(awaited=lambda: waits)
    rank.update()
    rank.engine.bound["b"][0] += 1
    waits = True
    for what in ("live", "spare"):
        found = rank.agent.audit(RankAudit(what))
        assert (found.checked, found.mismatched) == (0, ())
    waits = False
    assert rank.agent.audit(RankAudit("live")).mismatched == ("b",)


def test_digests_are_those_of_the_live_parameters() -> None:
    rank = Rank()
    rank.update()
    found = {each.name: each.digest for each in rank.agent.digests(RankDigests()).digests}
    assert found == {name: to_hex(tensor_digest(t)) for name, t in weights(2.0).items()}


def test_a_start_replay_tells_what_differs_from_live() -> None:
    rank = Rank(value=1.0)
    assert rank.stage(1, start=True).changed == ()
    rank.engine.bound["b"][4] += 1
    assert rank.stage(2, start=True).changed == ("b",)


@pytest.mark.case("F26")
def test_a_rank_says_what_it_holds_the_start_checkpoint_in() -> None:
    whole = Box.whole((2,))
    held = Placement(0, 1, tuple(CopyRow(f"s{at}", whole, f"p{at}", whole) for at in range(4)), frozenset())
    both = replace(held, rows=(*held.rows, CopyRow("s0", whole, "p1", whole)))
    dtypes = {"p0": torch.bfloat16, "p1": torch.float32, "p2": torch.int8, "p3": torch.float16}
    tensors = {name: torch.zeros(2, dtype=dtype) for name, dtype in dtypes.items()}
    assert dtypes_held(held, tensors, frozenset({"p3"})) == {"s0": "BF16", "s1": "F32", "s2": "", "s3": ""}
    assert dtypes_held(both, tensors, frozenset())["s0"] == ""
    tied = replace(held, redundant=(("head", "s1"),))
    assert dtypes_held(tied, tensors, frozenset())["head"] == "F32"
    rank = Rank()
    assert all(dtype for _, dtype in rank.plan(1, start=True).dtypes)
    assert rank.plan(2).dtypes == ()


def test_zero_and_unchanged_parameters_are_listed() -> None:
    rank = Rank(value=1.0)
    rank.tensors["a"] = torch.zeros(3, 4)
    vote = rank.stage(1)
    assert (vote.zero, vote.changed) == (("a",), ("a",))


def test_labelling_equal_bytes() -> None:
    rank = Rank()
    rank.agent.label("0-4", "d4")
    rank.update(5)
    assert rank.state == ("previous", 0, "0-4")
    with refused("no_rollback"):
        rank.agent.check_previous(RankCheckPrevious(6, "0-4", "other"))


def test_memory_is_flat_over_ten_updates() -> None:
    rank = Rank()
    size = rank.agent.status(RankStatus()).spare_bytes
    storages = lambda: {  # noqa: E731
        t.untyped_storage().data_ptr()
        for side in (rank.agent.spare.live, rank.agent.spare.spare)
        for t in side.values()
    }
    before = storages()
    for serial in range(1, 11):
        rank.tensors = weights(float(serial))
        rank.update(serial, MODES[serial % 2])
        assert rank.holds(float(serial))
    assert rank.agent.status(RankStatus()).spare_bytes == size
    assert storages() == before


def test_cuts_of_another_placement_are_refused() -> None:
    rank = Rank()
    plan = rank.plan(1)
    rank.agent.stage(RankStage(1, 9.0))
    cuts = make_cuts(plan.tensors, [plan.boxes])
    with refused("placement_refused", tensors=["a"]):
        rank.agent.verify(RankVerify(1, tuple(cut for cut in cuts if cut.name != "a"), 9.0))
    wrong = tuple(replace(cut, cuts=((0, 2), (0, 4))) if cut.name == "a" else cut for cut in cuts)
    with refused("placement_refused", tensors=["a"]):
        rank.agent.verify(RankVerify(1, wrong, 9.0))
    assert rank.state[0] == "staging"


def test_a_cell_that_this_rank_holds_in_part_is_refused() -> None:
    """Cuts that leave out this rank's border would digest half a cell."""
    rules = Rules()
    shapes = {"w": (2, 4)}
    engine = BareEngine(shapes, rules, dtypes={"w": torch.float32}, placement=_first_half)
    source = {"w": torch.arange(16.0).view(4, 4)}
    held = BareReplica([engine], lambda _rank: MemorySource(source))
    agent = held.agents[0]
    plan = agent.plan(RankPlan(1, DiskOffer(""), (), ""))
    agent.stage(RankStage(1, 9.0))
    with refused("placement_refused", tensors=["w"]):
        agent.verify(RankVerify(1, make_cuts(plan.tensors, [()]), 9.0))


def _first_half(specs: Any) -> Any:
    from engine_adapter.placement.declared.layouts import Sharded

    return declare(specs, {"w": Target((2, 4))}, Rules(layouts=(("w", Sharded(0)),)), 0, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["live", "spare"])
def test_an_install_does_not_wait_for_an_audit(what: str, mode: InstallMode) -> None:
    """And what the audit had read of the sides by then says nothing about either."""
    meanwhile: list[threading.Thread] = []
    audits = threading.Event()

    def clock() -> float:
        # asked before every tensor: the first time in the audit, another thread goes back to the version before
        if audits.is_set() and not meanwhile:
            meanwhile.append(threading.Thread(target=rank.install, args=(2, 1, mode)))
            meanwhile[0].start()
            meanwhile[0].join(20.0)  # one that waited for the audit would wait longer
        return 0.0

    rank = Rank(clock=clock)
    rank.update()
    rank.agent.check_previous(RankCheckPrevious(2, "start", ""))
    rank.pause(2)
    audits.set()
    found = rank.agent.audit(RankAudit(what))
    assert not meanwhile[0].is_alive()
    assert (found.checked, found.mismatched) == (0, ())
    assert rank.holds(1.0)
    rank.resume(2)
    audits.clear()
    assert (rank.agent.audit(RankAudit("live")).checked, rank.agent.audit(RankAudit("spare")).checked) == (2, 2)


def test_an_audit_that_begins_while_an_install_waits_for_the_lock_is_told_too() -> None:
    """Else it would compare bytes that an exchange has begun to move with what they were."""
    engine = BareEngine({"a": (3, 4)}, Rules(), dtypes=_F32)
    state = RankState(engine, RankSpare(engine.parameters()), DerivedStates((), {}))
    begun: list[threading.Event] = []

    class Lock:
        """Given away only after an audit had it, which leaves its own event behind."""

        def acquire(self, timeout: float) -> bool:
            state.auditing = threading.Event()
            begun.append(state.auditing)
            return True

        def release(self) -> None:
            pass

    state.staging = Lock()  # type: ignore[assignment]
    with state.quiet():
        assert begun[0].is_set()


def test_a_plan_that_a_discard_overtook_opens_nothing() -> None:
    """The plan waits behind other staging work while the control thread already drops its update (I6)."""
    rank = Rank()
    rank.agent.discard(RankDiscard(1))
    with refused("client_abort"):
        rank.plan(1)
    assert rank.opened == []
    rank.stage(2)
