"""A stock vLLM server in a fleet of one: published, served, cached, generated through, rolled back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter.models import encode, reference_tokens
from tests.vllm_server.fleet import Fleet
from tests.vllm_server.models import PROMPTS
from tests.vllm_server.server import VllmServer
from updater.core.policy import CachePolicy, InFlight

COUNT = 48
PREFIX = 3 * "a prefix of more than two blocks of the cache, which every prompt here begins with, whatever it asks; "
SUPPORTED = {
    (InFlight.DRAIN, CachePolicy.RESET),
    (InFlight.DRAIN, CachePolicy.NAMESPACE),
    (InFlight.DRAIN, CachePolicy.KEEP),
    (InFlight.ABORT, CachePolicy.RESET),
    (InFlight.ABORT, CachePolicy.NAMESPACE),
    (InFlight.ABORT, CachePolicy.KEEP),
    (InFlight.RECOMPUTE, CachePolicy.RESET),
    (InFlight.KEEP, CachePolicy.NAMESPACE),
}


@pytest.fixture
def fleet(llama_fleet: Fleet) -> Iterator[Fleet]:
    """On the first checkpoint, under a version of its own."""
    llama_fleet.publish(llama_fleet.first)
    yield llama_fleet
    assert llama_fleet.server.client.get("/readyz").status_code == 200


def expected(model: Path, prompt: str, number: int = COUNT) -> tuple[int, ...]:
    return reference_tokens(model, encode(prompt), number).tokens


def test_a_publication_serves_the_new_tokens_on_every_route_and_a_rollback_the_old(fleet: Fleet) -> None:
    before = fleet.live
    receipt = fleet.publish(fleet.second)
    label = receipt["version"]
    assert (receipt["outcome"], receipt["install"], receipt["rollback_to"]) == ("committed", "flip", before)
    assert 0 < receipt["tensors_changed"] <= receipt["tensors"]
    digest = fleet.coordinator.get("/v1/fleet")["members"][0]["live_digest"]
    whole = {"version": label, "digest": digest, "spans": [{"version": label, "start": 0, "end": COUNT}]}
    for prompt in PROMPTS:
        for answer in (fleet.server.complete(prompt, COUNT), fleet.server.complete_streaming(prompt, COUNT)):
            assert answer.tokens == expected(fleet.second, prompt)
            assert answer.body["liveweights"] == whole
    chat = fleet.server.chat(PROMPTS[0], COUNT)
    assert chat.body["liveweights"] == whole
    back = fleet.coordinator.rollback(before, label)
    assert (back["outcome"], back["kind"], back["live_version"]) == ("committed", "rollback", before)
    answer = fleet.server.complete(PROMPTS[0], COUNT)
    assert answer.tokens == expected(fleet.first, PROMPTS[0])
    assert answer.body["liveweights"]["version"] == before


def test_several_prompts_and_several_sequences_each_say_what_made_them(fleet: Fleet) -> None:
    body = {"model": fleet.server.model, "prompt": list(PROMPTS), "max_tokens": 4, "temperature": 1, "n": 2}
    answer = fleet.server.client.post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == 2 * len(PROMPTS)
    span = [{"version": fleet.live, "start": 0, "end": 4}]
    assert [choice["liveweights"]["spans"] for choice in answer["choices"]] == [span] * 2 * len(PROMPTS)


def test_a_streamed_chat_says_what_made_it(fleet: Fleet) -> None:
    body = {"model": fleet.server.model, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    body |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = fleet.server.client.post("/v1/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    told = [event["liveweights"] for event in events if "liveweights" in event]
    assert [each["spans"] for each in told] == [[{"version": fleet.live, "start": 0, "end": 8}]]


@pytest.mark.case("F08")
def test_keys_and_values_of_old_weights_meet_no_new_ones_unless_asked_to(fleet: Fleet) -> None:
    """I5. With `cache=keep` the same prompt gives tokens of neither version: the stale prefix is real, and it is said
    (F08)."""
    server, prompt = fleet.server, PREFIX[: 2 * 128 + 2]  # all but its last two tokens lie in whole blocks
    server.complete(prompt, 4)
    assert cached(server.complete(prompt, 4)) > 0
    for cache in ("reset", "namespace"):
        goes_to = fleet.other
        fleet.publish(goes_to, cache=cache)
        answer = server.complete(prompt, COUNT)
        assert cached(answer) == 0
        assert answer.tokens == expected(goes_to, prompt)
        again = server.complete(prompt, 4)
        assert cached(again) > 0
        assert "stale_prefix" not in again.body["liveweights"]
    goes_to = fleet.other
    fleet.publish(goes_to, cache="keep")
    stale = server.complete(prompt, COUNT)
    assert cached(stale) > 0
    assert stale.tokens != expected(goes_to, prompt)
    assert stale.body["liveweights"]["stale_prefix"] is True
    assert server.complete_streaming(prompt, COUNT).body["liveweights"]["stale_prefix"] is True


def cached(answer: Any) -> int:
    found: int = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


class Traffic:
    """Clients that stream one completion after the other. All have their first token when it is made."""

    CLIENTS, NUMBER = 8, 200

    def __init__(self, server: VllmServer) -> None:
        self._server, self._over = server, threading.Event()
        self._begun = threading.Barrier(self.CLIENTS + 1)
        self._pool = ThreadPoolExecutor(self.CLIENTS)
        self._clients = [self._pool.submit(self._client) for _ in range(self.CLIENTS)]
        self._begun.wait(120)

    def _client(self) -> list[Streamed]:
        replies: list[Streamed] = []
        while not self._over.is_set():
            events: list[dict[str, Any]] = []
            for event in self._server.stream(PROMPTS[0], self.NUMBER):
                events += [event] if event["choices"] else []
                if not replies and len(events) == 1:
                    self._begun.wait(120)
            replies.append(Streamed(events))
        return replies

    def end(self) -> list[Streamed]:
        """Every reply. Raises what a client met."""
        self._over.set()
        replies = [reply for client in self._clients for reply in client.result(240)]
        self._pool.shutdown()
        return replies


@dataclass(frozen=True)
class Streamed:
    """`events` of one reply that have a choice."""

    events: list[dict[str, Any]]

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = self.events[-1]["liveweights"]
        return found

    @property
    def versions(self) -> list[str]:
        return [span["version"] for span in self.said["spans"]]

    @property
    def reason(self) -> str:
        found: str = self.events[-1]["choices"][0]["finish_reason"]
        return found

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for event in self.events for token in event["choices"][0]["token_ids"] or ())


@pytest.mark.parametrize("cache", CachePolicy)
@pytest.mark.parametrize("mode", InFlight)
def test_every_cell_of_modes_and_policies_is_honoured_or_refused(
    fleet: Fleet, mode: InFlight, cache: CachePolicy
) -> None:
    before = fleet.live
    if (mode, cache) not in SUPPORTED:
        problem = fleet.publish(fleet.second, expect=422, in_flight=mode.value, cache=cache.value)
        assert (problem["code"], fleet.live) == ("mode_unsupported", before)
        assert fleet.server.complete(PROMPTS[0], COUNT).tokens == expected(fleet.first, PROMPTS[0])
        return
    with fleet.committing(fleet.second, in_flight=mode.value, cache=cache.value) as commit:
        traffic = Traffic(fleet.server)
        receipt = commit()
        replies = traffic.end()
    after = receipt["version"]
    models = {before: fleet.first, after: fleet.second}
    cut = [reply for reply in replies if reply.reason == "abort"]
    crossing = [reply for reply in replies if len(reply.versions) > 1]
    whole = [reply for reply in replies if reply not in cut and reply not in crossing]
    clients = {mode: Traffic.CLIENTS}
    assert len(cut) == receipt["aborted_requests"] == clients.get(InFlight.ABORT, 0)
    assert receipt["requeued_requests"] == clients.get(InFlight.RECOMPUTE, 0)
    assert len(crossing) == clients.get(InFlight.RECOMPUTE, 0) + clients.get(InFlight.KEEP, 0)
    assert len(whole) >= clients.get(InFlight.DRAIN, 0)
    for reply in whole:
        (version,) = reply.versions
        assert (reply.reason, len(reply.tokens)) == ("length", Traffic.NUMBER)
        if cache is not CachePolicy.KEEP or version == before:  # else old keys and values were asked for
            assert reply.tokens == expected(models[version], PROMPTS[0], Traffic.NUMBER)
    for reply in cut:
        assert (reply.said["reason"], reply.said["retryable"]) == ("aborted_by_update", True)
        assert reply.versions == [before]
        assert 0 < len(reply.tokens) < Traffic.NUMBER
        assert reply.tokens == expected(fleet.first, PROMPTS[0], Traffic.NUMBER)[: len(reply.tokens)]
    for reply in crossing:
        old, new = reply.said["spans"]
        assert (old["version"], new["version"], old["start"], new["end"]) == (before, after, 0, Traffic.NUMBER)
        assert old["end"] == new["start"]
        assert reply.tokens[: old["end"]] == expected(fleet.first, PROMPTS[0], Traffic.NUMBER)[: old["end"]]
    if mode is InFlight.RECOMPUTE:
        switch, tokens = crossing[0].said["spans"][0]["end"], crossing[0].tokens
        rest = reference_tokens(fleet.second, encode(PROMPTS[0]) + tokens[:switch], Traffic.NUMBER - switch).tokens
        assert tokens[switch:] == rest
    answer = fleet.server.complete(PROMPTS[1], COUNT)
    assert answer.tokens == expected(fleet.second, PROMPTS[1])


def test_tokens_are_made_between_two_staged_buckets_and_all_are_of_the_old_version(
    fleet: Fleet,
) -> None:
    before = fleet.live
    with fleet.stream(fleet.second) as (session, tensors):
        names = list(tensors)
        for name in names[: len(names) // 2]:
            session.put(name, tensors[name])
        between = fleet.server.complete(PROMPTS[0], COUNT)
        assert between.tokens == expected(fleet.first, PROMPTS[0])
        assert between.body["liveweights"]["version"] == before
        for name in names[len(names) // 2 :]:
            session.put(name, tensors[name])
        session.seal()
        assert session.wait().outcome == "committed"
    fleet.path = fleet.second
    assert fleet.server.complete(PROMPTS[0], COUNT).tokens == expected(fleet.second, PROMPTS[0])


def test_versions_that_a_request_asks_for(fleet: Fleet) -> None:
    live = fleet.live
    answer = fleet.server.complete(PROMPTS[0], 4, liveweights={"exact_version": live})
    assert answer.body["liveweights"]["version"] == live
    with pytest.raises(httpx.HTTPStatusError) as caught:
        fleet.server.complete(PROMPTS[0], 4, liveweights={"min_version": "1-0"})
    assert (caught.value.response.status_code, caught.value.response.json()["code"]) == (409, "version_not_served")
    with pytest.raises(httpx.HTTPStatusError) as caught:
        fleet.server.complete(PROMPTS[0], 4, liveweights={"min": 3})
    assert caught.value.response.json()["code"] == "bad_request"


@pytest.mark.case("F42")
def test_no_key_of_vllms_opens_the_participant_contract(fleet: Fleet) -> None:
    routes = ("participant/v1/status", "replica/v1/readmit", "replica/v1/release")
    with httpx.Client(base_url=fleet.server.url, trust_env=False) as stranger:
        assert [stranger.post(f"/liveweights/v1/{route}", json={}).status_code for route in routes] == [401] * 3
        assert stranger.get("/readyz").status_code == 200
        inference = {"Authorization": f"Bearer {fleet.inference_key}"}
        answers = [stranger.post(f"/liveweights/v1/{route}", json={}, headers=inference) for route in routes]
    assert [answer.json()["code"] for answer in answers] == ["unauthorized"] * 3
