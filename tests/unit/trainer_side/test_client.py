"""The client over httpx's own transport seam: requests as the API wants them, answers as typed results and errors."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from trainer_side.client import protocol
from trainer_side.client.client import AsyncClient, Client
from trainer_side.testing import RECEIPT
from updater.core.errors import (
    Aborted,
    Failure,
    LiveweightsError,
    Rejected,
    RolledBack,
    Unauthorized,
    Unavailable,
)
from updater.protocol.problems import problem_body

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler, token: str = "secret-token") -> Client:
    return Client("http://coordinator", token, transport=httpx.MockTransport(handler), backoff=0)


def async_client(handler: Handler) -> AsyncClient:
    return AsyncClient("http://coordinator", "secret-token", transport=httpx.MockTransport(handler), backoff=0)


def failing(error: LiveweightsError, **extra: Any) -> Handler:
    return lambda _request: httpx.Response(error.status, json=problem_body(error, **extra))


class Recorder:
    """Answers from a list and keeps what was asked; an exception in the list is a broken connection."""

    def __init__(self, *answers: httpx.Response | type[httpx.HTTPError]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        raise answer("broken")

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]


STREAMED: dict[str, Any] = {"source": {"kind": "broadcast", "address": "a", "session": "s"}, "version": 7}


def test_update_waits_and_returns_the_receipt() -> None:
    asked = Recorder(httpx.Response(200, json=RECEIPT))
    receipt = client(asked).update({"path": "/ckpts/v7", "version": 7})
    assert receipt.version == "0-7"
    assert receipt.serial == 4
    (request,) = asked.requests
    assert (request.method, request.url.path, dict(request.url.params)) == ("POST", "/v1/updates", {"wait": "true"})
    assert request.headers["authorization"] == "Bearer secret-token"
    assert asked.bodies() == [{"path": "/ckpts/v7", "version": 7}]


def test_no_token_sends_no_header() -> None:
    asked = Recorder(httpx.Response(200, json=RECEIPT))
    client(asked, token="").update({"version": 1})
    assert "authorization" not in asked.requests[0].headers


def test_a_broken_connection_is_tried_again_under_the_same_id() -> None:
    asked = Recorder(httpx.ConnectError, httpx.RemoteProtocolError, httpx.Response(200, json=RECEIPT))
    assert client(asked).update(STREAMED).outcome == "committed"
    assert len(asked.requests) == 3
    assert len({body["id"] for body in asked.bodies()}) == 1


@pytest.mark.case("F06")
@pytest.mark.parametrize(
    ("body", "ids"),
    [
        (STREAMED, 2),
        ({"path": "/p", "version": 7}, 0),
        ({"source": {"kind": "disk", "path": "/p"}, "version": "0-7"}, 0),
        ({"path": "/p", "version": 7, "policy": {"new_run": True}}, 2),  # once it is live, the next run is another
    ],
)
def test_two_pushes_have_two_ids_where_the_coordinator_knows_no_default(body: dict[str, Any], ids: int) -> None:
    asked = Recorder(httpx.Response(200, json=RECEIPT), httpx.Response(200, json=RECEIPT))
    one = client(asked)
    one.update(body)
    one.update(body)
    assert len({sent["id"] for sent in asked.bodies() if "id" in sent}) == ids


def test_nobody_there_is_unavailable_after_all_tries() -> None:
    asked = Recorder(*([httpx.ConnectError] * 20))
    with pytest.raises(Unavailable) as caught:
        client(asked).version()
    assert caught.value.code == "unreachable"
    assert caught.value.retryable
    assert len(asked.requests) == len(protocol.BACKOFF_S) + 1


@pytest.mark.case("F14")
@pytest.mark.parametrize("url", ["ray://coordinator@liveweights", "http://10.0.0.1:8700"])
def test_an_error_names_the_address_that_was_asked(url: str) -> None:
    def broken(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("it died")

    def other(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"replica": "one"})

    async def asked(handler: Handler) -> None:
        async with AsyncClient(url, transport=httpx.MockTransport(handler), backoff=0) as link:
            await link.version()

    for handler in (broken, other):
        with (
            pytest.raises(LiveweightsError) as caught,
            Client(url, transport=httpx.MockTransport(handler), backoff=0) as link,
        ):
            link.version()
        assert url in caught.value.failures[0].message
        with pytest.raises(LiveweightsError) as caught:
            asyncio.run(asked(handler))
        assert url in caught.value.failures[0].message


def test_a_call_that_took_all_its_time_is_not_repeated() -> None:
    asked = Recorder(httpx.ReadTimeout, httpx.Response(200, json=RECEIPT))
    with pytest.raises(Unavailable):
        client(asked).update({"version": 7})
    assert len(asked.requests) == 1


@pytest.mark.parametrize("kind", [Rejected, Aborted, RolledBack])
def test_every_end_but_committed_raises_its_class_with_the_receipt(kind: type[LiveweightsError]) -> None:
    failure = Failure("tensor_digest", "differs", replica="a", rank=1, tensor="model.norm.weight")
    error = kind(failure, live_version="0-6")
    with pytest.raises(kind) as caught:
        client(failing(error, receipt=RECEIPT | {"outcome": "aborted"})).update({"version": 7})
    assert type(caught.value) is kind
    assert caught.value.failures == (failure,)
    assert caught.value.live_version == "0-6"
    assert caught.value.receipt is not None
    assert caught.value.receipt["serial"] == 4


def test_a_wrong_token_is_unauthorized() -> None:
    with pytest.raises(Unauthorized):
        client(failing(Unauthorized(Failure("unauthorized", "no")))).fleet()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"failures": 3}'])
def test_answers_that_are_no_problem_documents_are_typed_all_the_same(body: bytes) -> None:
    with pytest.raises(LiveweightsError):
        client(lambda _request: httpx.Response(502, content=body)).version()


def test_a_success_that_is_no_json_object_is_an_error() -> None:
    with pytest.raises(LiveweightsError):
        client(lambda _request: httpx.Response(200, content=b"fine")).version()


def test_rollback_fills_in_what_is_live_and_offered() -> None:
    live = {
        "version": "0-7",
        "digest": "",
        "manifest_digest": "",
        "since": 1.0,
        "rollback_to": "0-6",
        "epoch": 1,
    }
    asked = Recorder(httpx.Response(200, json=live), httpx.Response(200, json=RECEIPT | {"kind": "rollback"}))
    assert client(asked).rollback().kind == "rollback"
    body = json.loads(asked.requests[1].content)
    assert (body["target"], body["expected_live"]) == ("0-6", "0-7")


def test_rollback_with_both_named_asks_nothing_first() -> None:
    asked = Recorder(httpx.Response(200, json=RECEIPT))
    client(asked).rollback("0-6", "0-7")
    assert [request.url.path for request in asked.requests] == ["/v1/rollback"]


def test_an_update_id_cannot_leave_its_path() -> None:
    asked = Recorder(httpx.Response(404, json=problem_body(Rejected(Failure("not_found", "none")))))
    with pytest.raises(Rejected):
        client(asked).status("../fleet?x=1")
    assert asked.requests[0].url.raw_path == b"/v1/updates/..%2Ffleet%3Fx%3D1"


STREAM = (
    b'event: phase\ndata: {"phase":\ndata: "STAGING"}\n\n: alive\n\ndata: no json\n\nevent: end\ndata: {"a": 1}\n\n'
)


def test_events_come_one_by_one() -> None:
    one = client(lambda _request: httpx.Response(200, content=STREAM))
    assert list(one.events("u")) == [("phase", {"phase": "STAGING"}), ("end", {"a": 1})]


def test_events_of_an_unknown_update_raise() -> None:
    with pytest.raises(Rejected) as caught:
        list(client(failing(Rejected(Failure("not_found", "none")))).events("u"))
    assert caught.value.code == "not_found"


def test_both_clients_have_the_same_methods_with_the_same_arguments_and_texts() -> None:
    own = {"run", "events", "close"}
    names = {name for name in dir(Client) if not name.startswith("_")}
    assert names == {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert {"update", "rollback", "version", "seal"} <= names
    for name in names - own:
        one, other = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(one) == inspect.signature(other)
        assert one.__doc__ == other.__doc__ != ""
        assert inspect.iscoroutinefunction(other)
    shown = inspect.signature(client(lambda _request: httpx.Response(200)).rollback)
    assert str(shown.return_annotation) == "Receipt"
    assert list(shown.parameters) == ["target", "expected_live", "timeout_s", "more"]


def test_the_async_twin_says_and_reads_the_same() -> None:
    async def story() -> None:
        asked = Recorder(httpx.Response(200, json=RECEIPT), httpx.Response(200, content=STREAM))
        async with async_client(asked) as one:
            assert (await one.update({"version": 7})).serial == 4
            assert [name async for name, _data in one.events("u")] == ["phase", "end"]
        assert asked.requests[0].url.params["wait"] == "true"
        async with async_client(failing(Aborted(Failure("superseded", "v8")), receipt=RECEIPT)) as one:
            with pytest.raises(Aborted) as caught:
                await one.update({"version": 7})
        assert caught.value.receipt == RECEIPT

    asyncio.run(story())


def test_the_async_twin_tries_again() -> None:
    async def story() -> None:
        asked = Recorder(httpx.ConnectError, httpx.Response(200, json=RECEIPT))
        async with async_client(asked) as one:
            await one.update(STREAMED)
        assert len({body["id"] for body in asked.bodies()}) == 1

    asyncio.run(story())
