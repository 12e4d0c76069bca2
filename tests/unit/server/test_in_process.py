"""An app called in its own process: what it is given, what comes back, and that leaving early ends it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from updater.core.errors import Failure, Rejected
from updater.protocol.api import JoinBody
from updater.ray.calls import Address, address_of
from updater.ray.local_app import LocalApp, LocalCall, LoopThread, call, stream
from updater.server import guard as http
from updater.server.security import Tokens

TOKEN = "admin-token-0123"


class Echo:
    """An app that tells what it was asked, refuses, and streams until its client has gone."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        self.app = FastAPI()
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.threads: set[str] = set()
        self.app.add_api_route("/echo/{name}", self.echo, methods=["POST"], response_model=None)
        self.app.add_api_route("/refused", self.refused, methods=["GET"], response_model=None)
        self.app.add_api_route("/endless", self.endless, methods=["GET"], response_model=None)
        http.install(self.app, tokens=tokens or Tokens(), max_body=1000)

    async def echo(self, name: str, request: Request) -> JSONResponse:
        self.threads.add(threading.current_thread().name)
        return JSONResponse({"name": name, "query": dict(request.query_params), "body": await request.json()})

    async def refused(self) -> None:
        raise Rejected(Failure("stale_version", "older"))

    async def endless(self) -> StreamingResponse:
        return StreamingResponse(self._pieces(), media_type="text/event-stream")

    async def _pieces(self) -> AsyncIterator[str]:
        self.began.set()
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def test_an_app_gets_path_query_and_body_and_its_answer_comes_whole() -> None:
    body = b'{"a": [1, 2]}'
    answer = asyncio.run(call(Echo().app, LocalCall("POST", "/echo/a%20b?x=1%262", body)))
    assert answer.status == 200
    assert json.loads(answer.body) == {"name": "a b", "query": {"x": "1&2"}, "body": {"a": [1, 2]}}


def test_refusals_and_bounds_are_those_of_the_app() -> None:
    refused = asyncio.run(call(Echo().app, LocalCall("GET", "/refused")))
    assert (refused.status, json.loads(refused.body)["code"]) == (412, "stale_version")
    large = asyncio.run(call(Echo().app, LocalCall("POST", "/echo/a", b"1" * 1001)))
    assert large.status == 413


def test_the_guard_of_the_app_needs_its_token() -> None:
    app = Echo(Tokens(admin=TOKEN)).app
    assert asyncio.run(call(app, LocalCall("GET", "/refused"))).status == 401
    assert asyncio.run(call(app, LocalCall("GET", "/refused", token=TOKEN))).status == 412


def test_a_stream_comes_as_it_is_made_and_leaving_it_ends_the_app() -> None:
    async def main() -> None:
        echo = Echo()
        async with asyncio.timeout(120):
            async with aclosing(stream(echo.app, LocalCall("GET", "/endless"))) as pieces:
                assert await anext(pieces) == 200
                assert await anext(pieces) == b"first"
                assert not echo.ended.is_set()
            await echo.ended.wait()

    asyncio.run(main())


def test_a_call_that_is_cancelled_ends_the_app() -> None:
    async def main() -> None:
        echo = Echo()
        asking = asyncio.ensure_future(call(echo.app, LocalCall("GET", "/endless")))
        async with asyncio.timeout(120):
            await echo.began.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(main())


def test_an_app_without_an_answer_is_an_error_and_no_success() -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        return

    with pytest.raises(RuntimeError):
        asyncio.run(call(silent, LocalCall("GET", "/")))


def test_a_face_works_for_callers_on_other_loops_and_the_app_runs_on_its_own() -> None:
    echo, loop = Echo(Tokens(admin=TOKEN)), LoopThread("own")
    face = LocalApp(echo.app, loop, TOKEN)

    async def main() -> None:
        async with asyncio.timeout(120):
            told = await face.verb("POST", "/echo/a", {"b": 1})
            assert told == {"status": 200, "body": {"name": "a", "query": {}, "body": {"b": 1}}}
            assert (await face.verb("GET", "/refused"))["body"]["code"] == "stale_version"
            async with aclosing(face.stream("GET", "/endless")) as pieces:
                assert [await anext(pieces), await anext(pieces)] == [200, "first"]
            await loop.run(_set(echo.ended))

    async def _set(event: asyncio.Event) -> bool:
        return await event.wait()

    for _caller in range(2):
        asyncio.run(main())
    assert echo.threads == {"own"}


@pytest.mark.parametrize("url", ["ray://one@fleet", "ray://a.b-c@0f3e"])
def test_an_actors_address_reads_as_it_is_written_and_may_join(url: str) -> None:
    assert str(Address.parse(url)) == url
    assert str(address_of(url)) == url
    assert JoinBody(replica="one", url=url).url == url


@pytest.mark.parametrize(
    "url", ["ray://one", "ray://@fleet", "ray://one@fleet/path", "ray://one@two@three", "http://x"]
)
def test_anything_else_is_no_address_of_an_actor(url: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(url)
    if url.startswith("ray://"):
        with pytest.raises(ValidationError):
            JoinBody(replica="one", url=url)
        with pytest.raises(Rejected):
            address_of(url)


def test_a_name_becomes_an_address() -> None:
    assert address_of("coordinator", "fleet") == Address("coordinator", "fleet")
