"""One rank of the toy engine in this process: tokens, pausing, caches across versions, faults, options."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.base import EngineSpec, GenerateRequest, TokenEvent
from engine_adapter.testing import ToyEngine, build_toy, expected_parameters, make_toy_checkpoint, reference_generate
from engine_adapter.testing.toy.faults import Fault, Faults, InjectedFault
from updater.core.errors import Rejected
from updater.core.policy import CachePolicy, InFlight, Policy, conflict

PROMPT = tuple(range(40, 57))
HANG_S = 60.0  # a guard


class Served:
    """A started engine and the events that it emits. While `going` is unset the step that emits one does not end."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.engine: ToyEngine = build_toy(EngineSpec(0, 1, str(folder), "", options))
        self.events: queue.Queue[TokenEvent] = queue.Queue()
        self.going = threading.Event()
        self.going.set()
        self.engine.set_version("0-7", "d7", CachePolicy.RESET)
        self.engine.start(self._emit)

    def _emit(self, event: TokenEvent) -> None:
        self.events.put(event)
        self.going.wait(HANG_S)

    def submit(self, prompt: tuple[int, ...], tokens: int, name: str = "a") -> None:
        self.engine.submit(GenerateRequest(name, prompt, tokens))

    def next(self) -> TokenEvent:
        return self.events.get(timeout=HANG_S)

    def rest(self) -> list[TokenEvent]:
        events = [self.next()]
        while events[-1].finish_reason is None:
            events.append(self.next())
        return events

    def install(self, folder: Path, version: str, policy: CachePolicy) -> None:
        """What an install comes to, while paused: other bytes, derived tensors, label."""
        tensors = expected_parameters(folder, 0, 1, self.engine.options)
        for name, tensor in tensors.items():
            self.engine.parameters()[name].rebind(tensor)
        for derived in self.engine.derived():
            derived.bind(derived.build({name: tensors[name] for name in derived.feeds}))
        self.engine.set_version(version, version, policy)


Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Served] = []

    def make(**options: Any) -> Served:
        started.append(Served(make_toy_checkpoint(tmp_path / "7", seed=7), options))
        return started[-1]

    yield make
    for served in started:
        served.engine.stop(HANG_S)


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    return make_toy_checkpoint(tmp_path / "8", seed=8)


def tokens_of(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.tokens)


def test_stop_tokens_end_a_reply(start: Start, tmp_path: Path) -> None:
    expected = reference_generate(make_toy_checkpoint(tmp_path / "7", seed=7), PROMPT, 8)
    served = start()
    served.engine.submit(GenerateRequest("a", PROMPT, 8, stop_token_ids=(expected[3],)))
    events = served.rest()
    assert events[-1].finish_reason == "stop"
    assert tokens_of(events) == expected[: expected.index(expected[3]) + 1]


def test_sampling_is_the_same_for_the_same_seed(start: Start) -> None:
    served = start()
    replies = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        served.engine.submit(GenerateRequest(name, PROMPT, 16, temperature=2.0, seed=seed))
        replies.append(tokens_of(served.rest()))
    assert replies[0] == replies[1] != replies[2]


@pytest.mark.case("F43")
@pytest.mark.parametrize("prompt", [(), (257,), (-1,), (1,) * 100_000], ids=["empty", "over", "under", "long"])
def test_a_prompt_that_cannot_be_run_is_refused_and_serving_goes_on(start: Start, prompt: tuple[int, ...]) -> None:
    served = start()
    with pytest.raises(Rejected) as caught:
        served.submit(prompt, 1)
    assert caught.value.code == "bad_request"
    served.submit(PROMPT, 1)
    assert served.rest()[-1].finish_reason == "length"


def test_a_pause_that_cannot_be_reached_in_time_is_withdrawn(start: Start) -> None:
    served = start()
    served.going.clear()
    served.submit(PROMPT, 3)
    served.next()
    with pytest.raises(TimeoutError):
        served.engine.pause(0.01)
    served.going.set()
    assert served.rest()[-1].finish_reason == "length"  # it was not paused, and did not pause later
    assert served.engine.pause(HANG_S).step == 3
    served.engine.unpause(HANG_S)


def test_what_is_submitted_while_paused_runs_afterwards(start: Start) -> None:
    served = start()
    point = served.engine.pause(HANG_S)
    served.submit(PROMPT, 4)
    assert served.engine.pause(HANG_S) == point
    served.engine.unpause(HANG_S)
    assert len(tokens_of(served.rest())) == 4


@pytest.mark.parametrize("namespaced", [True, False])
def test_a_prompt_is_answered_from_the_cache_until_the_version_changes(
    start: Start, eight: Path, namespaced: bool
) -> None:
    served = start(namespaced=namespaced)
    for name in ("a", "b"):
        served.submit(PROMPT, 2, name)
        events = served.rest()
    assert events[-1].cached_tokens == 16
    served.engine.pause(HANG_S)
    served.install(eight, "0-8", CachePolicy.RESET)  # no reset_cache: only a namespace can protect now
    served.engine.unpause(HANG_S)
    served.submit(PROMPT, 8, "c")
    fresh = served.rest()
    assert fresh[-1].cached_tokens == (0 if namespaced else 16)
    assert (tokens_of(fresh) == reference_generate(eight, PROMPT, 8)) is namespaced


@pytest.mark.parametrize("policy", [CachePolicy.NAMESPACE, CachePolicy.KEEP])
def test_a_kept_request_spans_two_versions_and_shares_none_of_its_blocks(
    start: Start, eight: Path, policy: CachePolicy
) -> None:
    served = start()
    served.going.clear()
    served.submit(PROMPT, 24, "spanning")
    first = [served.next()]
    with ThreadPoolExecutor(1) as other:
        pausing = other.submit(served.engine.pause, HANG_S)
        while not served.engine._gate.wanted:  # from then on the step that goes on is the last one
            pass
        served.going.set()
        pausing.result(HANG_S)
    blocks = served.engine.cache.sizes()
    served.install(eight, "0-8", policy)
    served.engine.unpause(HANG_S)
    events = first + served.rest()
    versions = [event.version for event in events]
    assert versions == sorted(versions)
    assert set(versions) == {"0-7", "0-8"}
    assert served.engine.cache.sizes() == blocks
    served.submit((*PROMPT, *tokens_of(events)), 1, "after")
    assert served.rest()[-1].cached_tokens == (16 if policy is CachePolicy.KEEP else 0)


def test_more_requests_than_may_run_wait_for_their_turn(start: Start, tmp_path: Path) -> None:
    served = start(max_running=2)
    for number in range(5):
        served.submit(PROMPT[number:], 6, str(number))
    tokens: dict[str, tuple[int, ...]] = {}
    while sum(len(made) for made in tokens.values()) < 30:
        event = served.next()
        tokens[event.request_id] = tokens.get(event.request_id, ()) + event.tokens
    folder = tmp_path / "7"
    assert tokens == {str(n): reference_generate(folder, PROMPT[n:], 6) for n in range(5)}


def test_every_legal_cell_is_supported_and_namespaces_only_with_namespaced_keys(start: Start) -> None:
    legal = {(i, c) for i in InFlight for c in CachePolicy if conflict(Policy(in_flight=i, cache=c)) is None}
    assert set(start().engine.capabilities.cells) == legal
    without = {cell for cell in legal if cell[1] is not CachePolicy.NAMESPACE}
    assert set(start(namespaced=False).engine.capabilities.cells) == without


def test_buffers_that_no_checkpoint_holds_survive_a_sleep(start: Start, eight: Path) -> None:
    served = start()
    served.engine.pause(HANG_S)
    served.engine.sleep()
    served.engine.wake()
    served.install(eight, "0-8", CachePolicy.RESET)
    served.engine.reset_cache()
    served.engine.unpause(HANG_S)
    served.submit(PROMPT, 8)
    assert tokens_of(served.rest()) == reference_generate(eight, PROMPT, 8)


def test_a_loop_that_fails_ends_its_requests_and_cannot_be_paused(start: Start) -> None:
    served = start(fault="raise:before:step:0:3")
    served.submit(PROMPT, 8)
    assert served.rest()[-1].finish_reason == "error"
    with pytest.raises(InjectedFault):
        served.engine.pause(HANG_S)


def test_options_may_come_as_text_and_unknown_ones_are_refused(start: Start, tmp_path: Path) -> None:
    options = start(expert_parallel="false", step_ms="2", namespaced="0").engine.options
    assert (options.expert_parallel, options.step_ms, options.namespaced) == (False, 2.0, False)
    with pytest.raises(ValueError):
        build_toy(EngineSpec(0, 1, str(tmp_path / "7"), "", {"speed": 9}))


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2),
        ({"intermediate_size": 25}, 2),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, changes: dict[str, int], size: int) -> None:
    folder = make_toy_checkpoint(tmp_path, **changes)
    with pytest.raises(Rejected) as refused:
        expected_parameters(folder, 0, size)
    assert refused.value.code == "placement_refused"


def test_faults_happen_at_the_call_and_on_the_rank_that_they_name() -> None:
    text = "raise:after:pause:1:2"
    assert Fault.parse(text) == Fault("raise", "after", "pause", 1, 2)
    elsewhere, here = Faults(text, 0), Faults(text, 1)
    reached = []
    for faults in (elsewhere, here):
        for number in (1, 2):
            try:
                with faults.around("pause"):
                    reached.append(number)
            except InjectedFault:
                reached.append(-number)
    assert reached == [1, 2, 1, 2, -2]
    for bad in ("raise:after:nothing:0:1", "explode:after:pause:0:1", "raise:during:pause:0:1"):
        with pytest.raises(ValueError):
            Fault.parse(bad)
