"""The middleware around vLLM's routes, over small ASGI apps that answer as its routes do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine_adapter.hosted.middleware import VersionMiddleware
from engine_adapter.hosted.replies import CallPart, Reply, current_reply
from engine_adapter.replica.replies import Span, Wanted
from engine_adapter.vllm.gate import read_output
from updater.core.errors import Failure, Unavailable
from updater.core.version import Version

OLD, NEW = Span("0-1", 0, 3), Span("0-2", 3, 5)
Handler = Callable[[Request, Reply], Awaitable[Response]]


def mine() -> Reply:
    reply = current_reply.get()
    assert reply is not None
    return reply


def made(reply: Reply, *sequences: tuple[Span, ...], cached: int = 0, stale: bool = False) -> None:
    """The engine was called once and made these."""
    part = reply.part(wanted=len(sequences))
    part.stale = stale
    part.sequences = dict(enumerate(sequences))
    part.cached_tokens = cached


def ask(handler: Handler, body: Any = None, *, path: str = "/v1/completions", **request: Any) -> httpx.Response:
    async def endpoint(found: Request) -> Response:
        return await handler(found, mine())

    app = VersionMiddleware(
        Starlette(routes=[Route(path, endpoint, methods=["POST"])]), lambda: "0-2", lambda v: f"d{v}"
    )

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            options = request or {"json": {} if body is None else body}
            return await asyncio.wait_for(client.post(path, **options), 60)

    return asyncio.run(main())


def stream(pieces: Callable[[], AsyncIterator[str | bytes]], body: Any = None, **options: Any) -> str:
    """What a client gets of a route that streams these."""

    async def handler(_request: Request, _reply: Reply) -> Response:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    return ask(handler, body, **options).text


def test_a_reply_says_what_made_it() -> None:
    async def handler(_request: Request, reply: Reply) -> Response:
        made(reply, (OLD, NEW), cached=7)
        return JSONResponse({"choices": [{"index": 0, "text": "ü"}], "usage": {"completion_tokens": 5}})

    answer = ask(handler)
    assert answer.json() == {
        "choices": [{"index": 0, "text": "ü"}],
        "usage": {"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 7}},
        "liveweights": {
            "version": "0-2",
            "digest": "d0-2",
            "spans": [{"version": "0-1", "start": 0, "end": 3}, {"version": "0-2", "start": 3, "end": 5}],
        },
    }
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.case("F08")
@pytest.mark.parametrize(("cached", "stale"), [(0, False), (0, True), (7, False), (7, True)])
def test_a_reply_over_stale_prefixes_says_so_streamed_or_not(cached: int, stale: bool) -> None:
    async def handler(_request: Request, reply: Reply) -> Response:
        made(reply, (NEW,), cached=cached, stale=stale)
        return JSONResponse({"choices": [{"index": 0}]})

    async def pieces() -> AsyncIterator[str]:
        made(mine(), (NEW,), cached=cached, stale=stale)
        yield event(choices=[{"index": 0, "text": "a", "finish_reason": "length"}]) + DONE

    streamed = json.loads(stream(pieces).split("\n\n")[0].removeprefix("data: "))
    for document in (ask(handler).json(), streamed):
        assert document["liveweights"].get("stale_prefix", False) is (cached > 0 and stale)


@pytest.mark.case("F08")
def test_choices_over_stale_prefixes_are_told_apart() -> None:
    async def handler(_request: Request, reply: Reply) -> Response:
        made(reply, (NEW,), cached=7, stale=True)
        made(reply, (NEW,), cached=7)
        return JSONResponse({"choices": [{"index": index} for index in range(2)]})

    document = ask(handler).json()
    assert document["liveweights"]["stale_prefix"] is True
    assert [choice["liveweights"].get("stale_prefix") for choice in document["choices"]] == [True, None]


def test_choices_of_several_prompts_each_have_their_own_spans() -> None:
    async def handler(_request: Request, reply: Reply) -> Response:
        made(reply, (OLD,), (NEW,))
        made(reply, (NEW,), (OLD,))
        return JSONResponse({"choices": [{"index": index} for index in range(4)]})

    choices = ask(handler).json()["choices"]
    assert [choice["liveweights"]["spans"][0]["version"] for choice in choices] == ["0-1", "0-2", "0-2", "0-1"]


@pytest.mark.parametrize("cut", [1, 5, 11, 10_000])
def test_the_last_event_of_a_stream_says_what_made_it_however_it_is_cut(cut: int) -> None:
    first = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    last = {"choices": [{"index": 0, "text": "\u00e9", "finish_reason": "stop"}]}
    events = b"".join(
        b"data: " + json.dumps(each, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
        for each in (first, last)
    )
    whole = events + b"data: [DONE]\n\n"

    async def pieces() -> AsyncIterator[bytes]:
        made(mine(), (OLD,))
        for start in range(0, len(whole), cut):
            yield whole[start : start + cut]

    lines = [line for line in stream(pieces).split("\n\n") if line]
    assert lines[0] == "data: " + json.dumps(first, separators=(",", ":"))
    said = json.loads(lines[1].removeprefix("data: "))
    assert said.pop("liveweights")["version"] == "0-1"
    assert said == last
    assert lines[2:] == ["data: [DONE]"]


def test_a_reply_that_an_update_ended_says_so() -> None:
    async def handler(_request: Request, reply: Reply) -> Response:
        made(reply, (OLD,))
        reply.ended_by_update = True
        return JSONResponse({"choices": [{"index": 0, "finish_reason": reason}]})

    reason = "abort"
    said = ask(handler).json()["liveweights"]
    assert (said["reason"], said["retryable"], said["version"]) == ("aborted_by_update", True, "0-1")
    reason = "length"  # this one was whole: of several, an update may end some
    assert set(ask(handler).json()["liveweights"]) == {"version", "digest", "spans"}


def event(**fields: Any) -> str:
    return "data: " + json.dumps(fields, separators=(",", ":")) + "\n\n"


DONE = "data: [DONE]\n\n"
USAGE = event(id="cmpl-7", choices=[], usage={"completion_tokens": 0})


@pytest.mark.parametrize("usage", ["", USAGE])
def test_a_stream_that_an_update_ended_before_its_first_token_has_a_last_event(usage: str) -> None:
    async def pieces() -> AsyncIterator[str]:
        reply = mine()
        for prompt in range(2):
            reply.part(f"cmpl-{prompt}", 2)
        reply.ended_by_update = True
        # The second of four choices was ended, too, and vLLM says so.
        yield event(id="cmpl", model="m", choices=[{"index": 1, "text": "a", "finish_reason": "abort"}])
        yield usage + DONE

    lines = [line for line in stream(pieces, {"model": "llama"}).split("\n\n") if line]
    assert "".join(line + "\n\n" for line in lines[4:]) == usage + DONE
    told = [json.loads(line.removeprefix("data: ")) for line in lines[:4]]
    assert [each["choices"][0]["index"] for each in told] == [1, 0, 2, 3]
    for each in told:
        assert (each["id"], each["model"]) == ("cmpl", "m")
        assert each["choices"][0]["finish_reason"] == "abort"
        assert (each["liveweights"]["reason"], each["liveweights"]["retryable"]) == ("aborted_by_update", True)
    assert told[1]["choices"][0]["text"] == ""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_that_last_event_names_the_request_where_vllm_sent_nothing(path: str) -> None:
    async def pieces() -> AsyncIterator[str]:
        mine().part("cmpl-5")
        mine().ended_by_update = True
        yield DONE

    first, last = stream(pieces, {"model": "llama"}, path=path).split("\n\n")[:2]
    told = json.loads(first.removeprefix("data: "))
    assert (told["id"], told["model"], last) == ("cmpl-5", "llama", DONE.strip())
    (choice,) = told["choices"]
    if path.endswith("/chat/completions"):
        assert (told["object"], choice["delta"]) == ("chat.completion.chunk", {})
    else:
        assert (told["object"], choice["text"]) == ("text_completion", "")


def test_events_of_another_api_are_not_ours_to_write() -> None:
    async def pieces() -> AsyncIterator[str]:
        mine().part("cmpl-5")
        mine().ended_by_update = True
        yield DONE

    assert stream(pieces, path="/cohere/v2/chat") == DONE


@pytest.mark.parametrize("finishes", [True, False])
def test_a_stream_that_broke_after_it_began_ends_with_the_error_and_not_as_if_it_were_whole(finishes: bool) -> None:
    first = event(choices=[{"index": 0, "text": "a", "finish_reason": None}])

    async def pieces() -> AsyncIterator[str]:
        reply = mine()
        reply.part("cmpl-5")
        yield first
        reply.failure = Unavailable(Failure("rank_died", "gone", rank=1))
        if finishes:
            yield event(choices=[{"index": 0, "text": "", "finish_reason": "abort"}])
        yield USAGE + DONE

    begun, error, *rest = [line + "\n\n" for line in stream(pieces).split("\n\n") if line]
    assert (begun, rest) == (first, [USAGE, DONE])
    told = json.loads(error.removeprefix("data: "))["error"]
    assert (told["code"], told["status"], told["retryable"]) == ("rank_died", 424, True)
    assert "gone" in told["message"]


def test_an_error_that_vllm_told_is_not_told_again() -> None:
    async def pieces() -> AsyncIterator[str]:
        reply = mine()
        reply.part("cmpl-5")
        yield event(choices=[{"index": 0, "text": "a", "finish_reason": None}])
        reply.failure = Unavailable(Failure("internal", "mixed"))
        yield event(error={"message": "mixed"})
        yield DONE

    assert stream(pieces).count('"error"') == 1


def test_spans_of_streamed_choices_are_right_before_all_sequences_were_seen() -> None:
    async def pieces() -> AsyncIterator[str]:
        reply = mine()
        for span in (OLD, NEW):
            reply.part(wanted=2).sequences = {0: (span,)}
        yield event(choices=[{"index": 2, "text": "a", "finish_reason": "stop"}])
        yield DONE

    told = json.loads(stream(pieces).split("\n\n")[0].removeprefix("data: "))
    assert told["liveweights"]["version"] == "0-2"
    assert [span["version"] for span in told["choices"][0]["liveweights"]["spans"]] == ["0-2"]


def test_the_first_of_two_sequences_that_ends_has_spans_of_its_own() -> None:
    async def pieces() -> AsyncIterator[str]:
        mine().part(wanted=2).sequences = {0: (OLD,)}
        yield event(choices=[{"index": 0, "text": "a", "finish_reason": "stop"}])
        yield DONE

    told = json.loads(stream(pieces).split("\n\n")[0].removeprefix("data: "))
    assert [span["version"] for span in told["choices"][0]["liveweights"]["spans"]] == ["0-1"]


def test_a_beam_search_says_its_version_and_claims_no_spans() -> None:
    async def handler(_request: Request, reply: Reply) -> Response:
        reply.version = "0-1"
        made(reply, (Span("0-1", 0, 1),))
        made(reply, (Span("0-1", 0, 1),))
        return JSONResponse({"choices": [{"index": 0}, {"index": 1}]})

    document = ask(handler, {"use_beam_search": True}).json()
    assert document["liveweights"] == {"version": "0-1", "digest": "d0-1", "spans": []}


def test_a_stream_that_no_update_ended_gets_no_event_of_ours() -> None:
    async def pieces() -> AsyncIterator[str]:
        mine().part("cmpl-5")
        yield USAGE + DONE

    assert stream(pieces) == USAGE + DONE


def test_answers_of_routes_that_never_called_the_engine_pass_as_they_are() -> None:
    async def handler(_request: Request, _reply: Reply) -> Response:
        return JSONResponse({"tokens": [1, 2]})

    assert ask(handler).json() == {"tokens": [1, 2]}


def test_an_error_of_vllm_passes_as_it_is() -> None:
    async def handler(_request: Request, reply: Reply) -> Response:
        made(reply, (OLD,))
        return JSONResponse({"error": {"message": "no"}}, 400)

    answer = ask(handler)
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "no"}})


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_gate_is_a_problem_document_whatever_the_route_made_of_it(stream: bool) -> None:
    async def late() -> AsyncIterator[bytes]:
        mine().failure = Unavailable(Failure("shut", "still shut"))
        yield b'data: {"error":"internal"}\n\n'

    async def handler(_request: Request, reply: Reply) -> Response:
        reply.part()
        if stream:
            return StreamingResponse(late(), media_type="text/event-stream")
        reply.failure = Unavailable(Failure("shut", "still shut"))
        return JSONResponse({"error": "internal"}, 500)

    answer = ask(handler)
    assert (answer.status_code, answer.json()["code"]) == (503, "shut")
    assert answer.json()["live_version"] == "0-2"
    assert answer.headers["retry-after"]


def test_wishes_are_taken_out_of_the_body() -> None:
    seen: list[Any] = []

    async def handler(request: Request, reply: Reply) -> Response:
        seen.append((await request.json(), reply.wanted, int(request.headers["content-length"])))
        return JSONResponse({})

    wish = {"prompt": "x", "liveweights": {"min_version": "0-1", "exact_version": 2}}
    ask(handler, content=json.dumps(wish), headers={"content-type": "Application/JSON"})
    body, wanted, length = seen[0]
    assert (body, wanted) == ({"prompt": "x"}, Wanted(Version(0, 1), Version(0, 2)))
    assert length == len(json.dumps(body))


@pytest.mark.parametrize(
    "wish",
    [7, [], {"min": 1}, {"min_version": "x"}, {"exact_version": 1.5}, {"exact_version": True}, {"min_version": []}],
)
def test_a_wish_that_cannot_be_read_is_refused(wish: Any) -> None:
    async def handler(_request: Request, _reply: Reply) -> Response:
        raise RuntimeError("the route must not run")

    answer = ask(handler, {"liveweights": wish})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    "request_",
    [
        {"content": b'{"liveweights": ', "headers": {"content-type": "application/json"}},
        {"content": b'["liveweights"]', "headers": {"content-type": "application/json"}},
        {"content": b"audio", "headers": {"content-type": "audio/wav"}},
    ],
)
def test_bodies_that_are_not_ours_to_read_reach_the_route(request_: dict[str, Any]) -> None:
    async def handler(request: Request, _reply: Reply) -> Response:
        return Response(await request.body())

    assert ask(handler, **request_).content == request_["content"]


def test_a_pooled_output_was_made_by_the_version_at_dispatch() -> None:
    class Pooled:
        outputs = object()
        num_cached_tokens = 0
        finished = True

    part = CallPart()
    part.take(read_output(Pooled()), "0-2")
    assert part.sequences == {0: (Span("0-2", 0, 0),)}
