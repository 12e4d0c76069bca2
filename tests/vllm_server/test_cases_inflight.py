"""Caches and requests in flight, against stock vLLM, with its real paged cache and its real scheduler."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.models import encode, reference_tokens
from tests.vllm_server.fleet import Fleet
from tests.vllm_server.test_cases import COUNT, refusing
from tests.vllm_server.test_publish import PREFIX, cached
from updater.core.policy import CachePolicy, InFlight

LONG = 440  # tokens: nearly all that a sequence of these servers holds
#: All but the last tokens lie in whole blocks of the cache.
SHARED = PREFIX[: 2 * 128]
PROMPTS = tuple(f"{number}: {SHARED[:40]}" for number in ("one", "two", "three", "four"))


class Generation:
    """A long completion that streams from a thread of its own."""

    def __init__(self, fleet: Fleet, prompt: str, number: int) -> None:
        self._events: list[dict[str, Any]] = []
        self._begun = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._whole = self._pool.submit(self._run, fleet, prompt, number)

    def _run(self, fleet: Fleet, prompt: str, number: int) -> None:
        try:
            for event in fleet.server.stream(prompt, number):
                self._events += [event] if event["choices"] else []
                self._begun.set()
        finally:
            self._begun.set()

    def wait_begun(self) -> None:
        """Until its first token is there."""
        assert self._begun.wait(120)

    def end(self) -> dict[str, Any]:
        """The last event. Raises what the request ended as."""
        self._whole.result(240)
        self._pool.shutdown()
        return self._events[-1]

    @property
    def reason(self) -> str:
        found: str = self.end()["choices"][0]["finish_reason"]
        return found

    @property
    def spans(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.end()["liveweights"]["spans"]
        return found

    @property
    def versions(self) -> list[str]:
        return [span["version"] for span in self.spans]

    @property
    def tokens(self) -> tuple[int, ...]:
        self.end()
        return tuple(token for event in self._events for token in event["choices"][0]["token_ids"] or ())


def generating(fleet: Fleet, *prompts: str, number: int = LONG) -> list[Generation]:
    """All at once, and all have begun."""
    running = [Generation(fleet, prompt, number) for prompt in prompts]
    for each in running:
        each.wait_begun()
    return running


@pytest.fixture
def fleet(llama_fleet: Fleet) -> Iterator[Fleet]:
    """On the first checkpoint."""
    llama_fleet.publish(llama_fleet.first)
    yield llama_fleet
    assert llama_fleet.server.client.get("/readyz").status_code == 200


def expected(fleet: Fleet, prompt: Sequence[int], number: int = COUNT) -> tuple[int, ...]:
    """What a fresh engine on the live checkpoint says."""
    return reference_tokens(fleet.path, prompt, number).tokens


@pytest.mark.case("B130")
def test_a_prompt_served_on_the_old_version_is_computed_anew(fleet: Fleet) -> None:
    fleet.server.complete(SHARED, COUNT)
    assert cached(fleet.server.complete(SHARED, COUNT)) > 0
    fleet.publish(fleet.second)
    after = fleet.server.complete(SHARED, COUNT)
    assert (cached(after), after.tokens) == (0, expected(fleet, encode(SHARED)))


@pytest.mark.case("B131")
def test_the_invalidation_is_part_of_the_commit(fleet: Fleet) -> None:
    """No cache is flushed, and no engine slept: eight updates in a row, and never a block of another one."""
    for _ in range(8):
        fleet.publish(fleet.other)
        first, again = (fleet.server.complete(SHARED, COUNT) for _ in range(2))
        assert (cached(first), cached(again) > 0) == (0, True)
        assert first.tokens == again.tokens == expected(fleet, encode(SHARED))


@pytest.mark.case("B133")
@pytest.mark.parametrize("mode", [InFlight.DRAIN, InFlight.ABORT, InFlight.RECOMPUTE])
def test_running_requests_never_keep_the_cache_from_being_reset(fleet: Fleet, mode: InFlight) -> None:
    before = fleet.live
    with fleet.committing(fleet.second, in_flight=mode.value) as commit:
        running = generating(fleet, *PROMPTS)
        receipt = commit()
    assert [each.reason for each in running] == ["abort" if mode is InFlight.ABORT else "length"] * 4
    for each in running:
        assert each.versions == ([before, receipt["version"]] if mode is InFlight.RECOMPUTE else [before])
        if mode is InFlight.ABORT:
            said = each.end()["liveweights"]
            assert (said["reason"], said["retryable"]) == ("aborted_by_update", True)
    aborted = 4 if mode is InFlight.ABORT else 0
    requeued = 4 if mode is InFlight.RECOMPUTE else 0
    assert (receipt["aborted_requests"], receipt["requeued_requests"]) == (aborted, requeued)
    prompt = fleet.server.complete(SHARED, COUNT)
    assert (cached(prompt), prompt.tokens) == (0, expected(fleet, encode(SHARED)))


@pytest.mark.case("B134")
def test_a_request_that_was_frozen_shares_no_block_with_a_later_one(fleet: Fleet) -> None:
    """`keep` goes with `namespace` alone; what spans versions then never feeds the cache of the new one (I5)."""
    for cache in (CachePolicy.RESET, CachePolicy.KEEP):
        with refusing(fleet):
            problem = fleet.publish(fleet.second, expect=422, in_flight="keep", cache=cache.value)
            assert problem["code"] == "mode_unsupported"
    before = fleet.live
    with fleet.committing(fleet.second, in_flight="keep", cache="namespace") as commit:
        (frozen,) = generating(fleet, SHARED, number=200)
        receipt = commit()
    later = fleet.server.complete(SHARED + "later", COUNT)
    assert (cached(later), later.tokens) == (0, expected(fleet, encode(SHARED + "later")))
    assert frozen.versions == [before, receipt["version"]]
    # Also what it wrote after the switch, and its whole sequence as a prompt.
    whole = (*encode(SHARED), *frozen.tokens)
    again = fleet.server.complete(whole, COUNT)
    assert (cached(again) <= len(encode(SHARED)), again.tokens) == (True, expected(fleet, whole))


@pytest.mark.case("B139")
def test_recompute_aborts_none_of_four_and_each_token_has_its_version(fleet: Fleet) -> None:
    before = fleet.live
    with fleet.committing(fleet.second, in_flight="recompute") as commit:
        running = generating(fleet, *PROMPTS)
        receipt = commit()
    assert (receipt["aborted_requests"], receipt["requeued_requests"]) == (0, 4)
    for prompt, request in zip(PROMPTS, running, strict=True):
        assert (request.reason, request.versions) == ("length", [before, receipt["version"]])
        follows(encode(prompt), request, {before: fleet.first, receipt["version"]: fleet.second})


def follows(prompt: tuple[int, ...], request: Generation, made_by: Mapping[str, Path]) -> None:
    """Every token is the one of the version that its span names, after all that was said before it."""
    spans, tokens = request.spans, request.tokens
    assert [span["start"] for span in spans] + [len(tokens)] == [0] + [span["end"] for span in spans]
    for span in spans:
        start, end = span["start"], span["end"]
        said = reference_tokens(made_by[span["version"]], prompt + tokens[:start], end - start).tokens
        assert tokens[start:end] == said


@pytest.mark.case("B141")
def test_no_step_reads_two_versions(fleet: Fleet) -> None:
    """Updates one after the other while forward passes run: the weights change between two tokens, never in one."""
    made_by = {fleet.live: fleet.first}
    prompt = SHARED[:40]
    with fleet.committing(fleet.second, in_flight="recompute") as commit:
        (running,) = generating(fleet, prompt)
        made_by[commit()["version"]] = fleet.second
    for _ in range(2):
        receipt = fleet.publish(fleet.other, in_flight="recompute")
        made_by[receipt["version"]] = fleet.path
    assert running.versions in [list(made_by)[:count] for count in (2, 3, 4)]
    follows(encode(prompt), running, made_by)


@pytest.mark.case("B141")
def test_a_drain_installs_after_the_last_token(fleet: Fleet) -> None:
    before = fleet.live
    with fleet.committing(fleet.second) as commit:
        running = generating(fleet, *PROMPTS)
        commit()
    for prompt, request in zip(PROMPTS, running, strict=True):
        assert (request.reason, request.versions) == ("length", [before])
        assert request.tokens == reference_tokens(fleet.first, encode(prompt), LONG).tokens
