"""The OpenAI-compatible face over a gate whose engine is played by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_adapter.replica.admission import Gate, Limits
from engine_adapter.replica.app import ReplicaApp, make_app
from engine_adapter.replica.completions import ModelText, TextStream
from engine_adapter.testing.requests import HandEngine
from updater.core.errors import Failure
from updater.core.policy import InFlight
from updater.server.security import Tokens

JSON = {"content-type": "application/json"}

Scene = Callable[[httpx.AsyncClient, HandEngine, Gate], Awaitable[None]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def play(model: Path, scene: Scene, *, limits: Limits | None = None, tokens: Tokens | None = None) -> None:
    async def run() -> None:
        engine = HandEngine()
        gate = engine.gate = Gate(engine, limits)
        app = make_app(ReplicaApp("r0", gate), gate, ModelText.load(model, "tiny"), tokens or Tokens())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            async with asyncio.timeout(120):
                await scene(client, engine, gate)

    asyncio.run(run())


def post(client: httpx.AsyncClient, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(client.post("/v1/completions", json={"prompt": [1, 2, 3], **body}))


def test_a_reply_says_which_version_made_which_tokens(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        reply = post(client, max_tokens=4)
        await engine.until_submitted(1)
        assert engine.submitted["r1"].stop_token_ids == (256,)
        engine.emit("r1", 65, 66, version="0-1", cached=2)
        engine.emit("r1", 256, version="0-1", finish="stop")
        answer = (await reply).json()
        assert answer["choices"][0]["token_ids"] == [65, 66, 256]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 3)
        told = answer["liveweights"]
        assert (told["version"], told["spans"]) == ("0-1", [{"version": "0-1", "start": 0, "end": 3}])
        assert "retryable" not in told

    play(model, scene)


def test_a_stream_ends_with_usage_and_versions(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        reply = post(client, max_tokens=4, stream=True)
        await engine.until_submitted(1)
        engine.emit("r1", 65, version="0-1")
        engine.emit("r1", 66, version="0-1", finish="length")
        lines = [line for line in (await reply).text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[65], [66]]
        assert "liveweights" not in chunks[0]
        assert chunks[-1]["liveweights"]["spans"] == [{"version": "0-1", "start": 0, "end": 2}]
        assert chunks[-1]["usage"]["total_tokens"] == 5

    play(model, scene)


def test_a_reply_that_an_update_cut_short_says_so(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        reply = post(client)
        await engine.until_submitted(1)
        engine.emit("r1", 65, version="0-1")
        gate.close(InFlight.ABORT, "0-2")
        engine.emit("r1", version="0-1", finish="abort")
        response = await reply
        answer = response.json()
        assert (response.status_code, answer["choices"][0]["finish_reason"]) == (200, "abort")
        assert answer["choices"][0]["token_ids"] == [65]
        assert (answer["liveweights"]["reason"], answer["liveweights"]["retryable"]) == ("aborted_by_update", True)

    play(model, scene)


def test_a_shut_replica_answers_503_with_the_time_to_come_back(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        answer = await post(client)
        assert (answer.json()["code"], answer.status_code) == ("shut", 503)
        assert int(answer.headers["Retry-After"]) > 0
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503

    play(model, scene, limits=Limits(wait_s=0.05))


def test_a_full_queue_answers_503_at_once(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        first, second = post(client), post(client)
        done, (waiting,) = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = [task.result() for task in done]
        assert (refused.json()["code"], refused.status_code) == ("queue_full", 503)
        assert int(refused.headers["Retry-After"]) > 0
        gate.open("0-1")
        await engine.until_submitted(1)
        (name,) = engine.submitted
        engine.emit(name, 65, version="0-1", finish="length")
        assert (await waiting).status_code == 200

    play(model, scene, limits=Limits(max_waiting=1))


def test_a_version_that_is_not_served_is_a_retryable_409(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        gate.open("2-5")
        for wish in ({"min_version": 6}, {"exact_version": "2-4"}, {"min_version": "3-0"}):
            response = await post(client, liveweights=wish)
            told = response.json()
            assert (response.status_code, told["code"], told["retryable"]) == (409, "version_not_served", True)
            assert told["live_version"] == "2-5"
        served = post(client, liveweights={"min_version": 5})
        await engine.until_submitted(1)
        engine.emit(next(iter(engine.submitted)), 1, version="2-5", finish="length")
        assert (await served).status_code == 200

    play(model, scene)


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": 1},
        {"n": 2},
        {"echo": True},
        {"stop": "x"},
        {"top_p": 0.5},
        {"no_such_member": 1},
        {"prompt": "text"},
        {"prompt": []},
        {"prompt": [300]},
        {"prompt": [-1]},
        {"prompt": [True]},
        {"max_tokens": 62},
        {"max_tokens": 0},
        {"liveweights": {"exact_version": "newest"}},
        {"liveweights": {"version": 1}},
    ],
)
def test_what_is_not_supported_is_refused(model: Path, body: dict[str, Any]) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        response = await post(client, **body)
        assert (response.status_code, response.json()["code"]) == (400, "bad_request")
        assert engine.submitted == {}

    play(model, scene)


def test_another_model_is_not_found(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        assert (await post(client, model="other")).status_code == 404
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"

    play(model, scene)


def test_an_engine_error_is_an_error_and_not_a_short_answer(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        gate.open("0-1")
        whole, stream = post(client), post(client, stream=True)
        await engine.until_submitted(2)
        gate.break_down(Failure("rank_died", "gone", rank=1))
        response = await whole
        assert (response.status_code, response.json()["failures"][0]["rank"]) == (424, 1)
        last = json.loads((await stream).text.split("\n\n")[-3].removeprefix("data: "))
        assert (last["choices"][0]["finish_reason"], last["error"]["code"]) == ("error", "rank_died")

    play(model, scene)


def test_the_scopes_open_what_is_theirs(model: Path) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        paths = ("/v1/models", "/participant/v1/status", "/metrics")
        status = {}
        for name, token in (("none", ""), ("inference", "inference-1"), ("admin", "admin-token-1")):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            status[name] = [
                (await client.request("POST" if "part" in path else "GET", path, headers=headers)).status_code
                for path in paths
            ]
        assert status == {"none": [401, 401, 401], "inference": [200, 403, 403], "admin": [200, 503, 200]}

    play(model, scene, tokens=Tokens(admin="admin-token-1", inference="inference-1"))


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"fence": 1}', b"\x80\x04K\x01."])
def test_an_unreadable_participant_message_is_a_bad_request(model: Path, body: bytes) -> None:
    async def scene(client: httpx.AsyncClient, engine: HandEngine, gate: Gate) -> None:
        response = await client.post("/participant/v1/install", content=body, headers=JSON)
        assert (response.status_code, response.json()["code"]) == (400, "bad_request")
        assert (await client.post("/participant/v1/explode", json={})).status_code == 404

    play(model, scene)


def test_text_comes_in_whole_characters() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    stream = TextStream(tokenizer)
    first, second = stream.add((0,), last=False), stream.add((1,), last=True)
    assert first + second == tokenizer.decode([0, 1])
    assert TextStream(None).add((1, 2), last=True) == ""


class Counting:
    """A tokenizer that says how many tokens it was given at most at a time."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.most = inner, 0

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(tokens))
        text: str = self.inner.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_tokenizer() -> Tokenizer:
    words = ["\u2581the", "\u2581brig", "s", "\u2581at", "\u2581", "dawn"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_text_of_a_long_reply_is_made_from_a_window(kind: str, size: int) -> None:
    if kind == "bytes":
        tokenizer = byte_tokenizer()
        ids = tokenizer.encode("the brig \u00e4t d\u00e4wn \U0001f6a2 \u4e2d\u6587, and on ".strip() * 20).ids
    else:
        tokenizer, ids = word_tokenizer(), [0, 1, 2, 3, 4, 5, 0, 4, 2] * 20
    counting: Any = Counting(tokenizer)
    stream = TextStream(counting)
    parts = [tuple(ids[at : at + size]) for at in range(0, len(ids), size)]
    told = [stream.add(part, last=at == len(parts) - 1) for at, part in enumerate(parts)]
    assert "".join(told) == tokenizer.decode(ids)
    assert not any("\ufffd" in text for text in told)
    assert counting.most <= 4 * size + 8
