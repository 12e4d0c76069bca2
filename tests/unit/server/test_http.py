"""What `guard.install` gives any app: closed paths, bounded bodies, problem documents."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from updater.core.errors import Failure, Rejected, RolledBack, Unauthorized, Unavailable
from updater.protocol import problems
from updater.protocol.answers import FleetState, ToldGroup
from updater.server import guard as http
from updater.server.security import ADMIN_ENV, ConfigurationError, Tokens, check_bind, is_loopback

ADMIN, INFERENCE = "admin-token-1234", "inference-token-1234"


class Body(BaseModel):
    number: int


def app(tokens: Tokens, max_body: int = 100) -> FastAPI:
    made = FastAPI()

    @made.get("/healthz")
    async def healthz() -> str:
        return "ok"

    @made.post("/v1/echo")
    async def echo(body: Body) -> int:
        return body.number

    @made.get("/v1/open")
    async def open_to_inference() -> str:
        return "ok"

    @made.get("/v1/fails/{how}")
    async def fails(how: str) -> None:
        if how == "known":
            raise RolledBack(Failure("rank_failed", "no", replica="r1", rank=1), live_version="0-3")
        if how == "unavailable":
            raise Unavailable(Failure("shut", "no"))
        raise RuntimeError(ADMIN)

    http.install(
        made,
        tokens=tokens,
        inference_paths=frozenset({"/v1/open"}),
        max_body=max_body,
        body_limits={"/v1/big": 1000},
        live_version=lambda: "0-9",
    )
    return made


def ask(
    method: str, path: str, *, tokens: Tokens | None = None, token: str = "", content: object = None, **headers: str
) -> httpx.Response:
    """One request, straight into the app; the path is sent as it is."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app(tokens or Tokens()), raise_app_exceptions=False)
        if token:
            headers["authorization"] = f"Bearer {token}"
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, content=content, headers=headers)  # type: ignore[arg-type]

    return asyncio.run(run())


BOTH = Tokens(ADMIN, INFERENCE)


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/healthz", "", 200),
        ("/v1/open", "", 401),
        ("/v1/open", INFERENCE, 200),
        ("/v1/open", ADMIN, 200),
        ("/v1/fails/known", INFERENCE, 403),
        ("/v1/fails/known", ADMIN, 424),
        ("/v1/fails/known", ADMIN[:-1], 401),
        ("/v1/fails/known", ADMIN + "x", 401),
        ("/nothing", "", 401),
        ("/nothing", ADMIN, 404),
        ("//healthz", "", 401),
        ("/healthz/", "", 401),
        ("/HEALTHZ", "", 401),
        ("/%68ealthz", "", 200),
        ("/healthz%2f..%2fv1/open", "", 401),
        ("/v1/open/", INFERENCE, 403),
        ("/v1/open/", ADMIN, 404),
        ("/v1//open", INFERENCE, 403),
        ("/V1/open", INFERENCE, 403),
        ("/openapi.json", "", 401),
        ("/docs", "", 401),
    ],
)
def test_what_is_not_listed_is_closed(path: str, token: str, status: int) -> None:
    answer = ask("GET", path, tokens=BOTH, token=token)
    assert answer.status_code == status
    if status >= 400:
        assert answer.json()["status"] == status
        assert answer.headers["content-type"] == http.MEDIA_TYPE


def test_with_one_scope_configured_the_other_is_closed_not_open() -> None:
    only = Tokens(inference=INFERENCE)
    assert ask("GET", "/v1/fails/known", tokens=only).status_code == 401
    assert ask("GET", "/v1/fails/known", tokens=only, token=INFERENCE).status_code == 403
    assert ask("GET", "/v1/open", tokens=Tokens(admin=ADMIN)).status_code == 401


def test_without_a_token_loopback_is_open() -> None:
    assert ask("GET", "/v1/open").status_code == 200


def test_two_authorization_headers_are_none() -> None:
    async def run() -> int:
        transport = httpx.ASGITransport(app(BOTH))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = [("authorization", f"Bearer {ADMIN}"), ("authorization", f"Bearer {ADMIN}")]
            return (await client.get("/v1/open", headers=headers)).status_code

    assert asyncio.run(run()) == 401


def test_a_known_error_becomes_its_document() -> None:
    answer = ask("GET", "/v1/fails/known")
    document = answer.json()
    assert answer.status_code == 424
    assert (document["code"], document["retryable"], document["live_version"]) == ("rank_failed", True, "0-3")
    assert document["failures"][0]["replica"] == "r1"
    back = problems.error_of(answer.status_code, document)
    assert isinstance(back, RolledBack)
    assert back.failures == (Failure("rank_failed", "no", replica="r1", rank=1),)


def test_what_is_live_is_filled_in_and_503_says_when_to_come_back() -> None:
    answer = ask("GET", "/v1/fails/unavailable")
    assert (answer.status_code, answer.json()["live_version"]) == (503, "0-9")
    assert int(answer.headers["retry-after"]) >= 1


def test_an_unexpected_error_shows_its_type_and_nothing_else() -> None:
    answer = ask("GET", "/v1/fails/unexpected")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert ADMIN not in answer.text


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"number": 1}', 200, None),
        (b'{"number": "x"}', 400, "bad_request"),
        (b"{}", 400, "bad_request"),
        (b"{", 400, "bad_request"),
        (b"\xff\xfe", 400, "bad_request"),
        (b"[" * 100, 400, "bad_request"),
        (b'{"number": 1' + b" " * 88 + b"}", 413, "body_too_large"),
    ],
)
def test_bodies(content: bytes, status: int, code: str | None) -> None:
    answer = ask("POST", "/v1/echo", content=content, **{"content-type": "application/json"})
    assert answer.status_code == status
    if code:
        assert answer.json()["code"] == code


def test_a_body_of_untold_length_is_counted() -> None:
    taken: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        for number in range(1_000_000):
            taken.append(number)
            yield b" " * 50

    answer = ask("POST", "/v1/echo", content=endless(), **{"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert len(taken) < 10


@pytest.mark.case("B159")
def test_deep_nesting_is_refused_and_the_app_lives() -> None:
    """10 MB of nesting, under a limit that lets it in."""

    async def run() -> tuple[int, int]:
        transport = httpx.ASGITransport(app(Tokens(), max_body=20 << 20), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            deep = await client.post(
                "/v1/echo", content=b"[" * (10 << 20), headers={"content-type": "application/json"}
            )
            after = await client.post("/v1/echo", json={"number": 2})
            return deep.status_code, after.json()

    assert asyncio.run(run()) == (400, 2)


def test_limits_by_prefix() -> None:
    told = {"content-type": "application/json"}
    assert ask("POST", "/v1/big/thing", content=b" " * 900, **told).status_code == 404
    assert ask("POST", "/v1/big/thing", content=b" " * 1100, **told).status_code == 413
    assert ask("POST", "/v1/small", content=b" " * 900, **told).status_code == 413


def test_a_wrong_method_is_a_document() -> None:
    answer = ask("DELETE", "/v1/echo")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example", "2130706433", "192.168.1.1")],
)
def test_a_public_bind_without_a_token_does_not_start(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    check_bind(host, Tokens(admin=ADMIN))
    for tokens in (Tokens(), Tokens(inference=INFERENCE)):
        if loopback:
            check_bind(host, tokens)
        else:
            with pytest.raises(ConfigurationError):
                check_bind(host, tokens)


def test_tokens_are_not_shown(tmp_path: Path) -> None:
    assert ADMIN not in repr(BOTH)
    assert INFERENCE not in repr(BOTH)
    path = tmp_path / "token"
    path.write_text(f"{ADMIN}\n")
    os.chmod(path, 0o600)
    assert Tokens.from_env({f"{ADMIN_ENV}_FILE": str(path)}) == Tokens(admin=ADMIN)
    os.chmod(path, 0o644)
    with pytest.raises(ConfigurationError):
        Tokens.from_env({f"{ADMIN_ENV}_FILE": str(path)})


@pytest.mark.parametrize("token", ["short", "has a space in it", "näht-das-nicht", "line\nbreak-token"])
def test_weak_or_odd_tokens_are_refused(token: str) -> None:
    with pytest.raises(ConfigurationError):
        Tokens(admin=token)


def test_empty_and_equal_tokens_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        Tokens(ADMIN, ADMIN)
    with pytest.raises(ConfigurationError):
        Tokens.from_env({ADMIN_ENV: ""})
    with pytest.raises(ConfigurationError):
        Tokens.from_env({f"{ADMIN_ENV}_FILE": "/nonexistent/token"})


def test_documents_of_others_are_read_with_care() -> None:
    new = {"code": "from_the_future", "message": "x", "replica": "r1", "rank": 2}
    odd = {"failures": [new, 7], "receipt": {"outcome": "aborted"}}
    error = problems.error_of(424, odd)
    assert [failure.code for failure in error.failures] == ["internal", "internal"]
    assert (error.failures[0].message, error.failures[0].replica, error.failures[0].rank) == ("x", "r1", 2)
    assert error.receipt == {"outcome": "aborted"}
    assert problems.error_of(503, None).code == "shut"
    assert problems.error_of(401, "x").code == "unauthorized"
    assert isinstance(problems.error_of(422, problems.problem_body(Rejected(Failure("file_header", "x")))), Rejected)
    assert isinstance(
        problems.error_of(401, problems.problem_body(Unauthorized(Failure("unauthorized", "x")))), Unauthorized
    )


def test_answers_of_another_release_are_read_with_care() -> None:
    new = {"code": "from_the_future", "message": "x", "replica": "r1", "rank": 2}
    group = {"code": "from_the_future", "count": 9, "examples": [new]}
    state = {"phase": "IDLE", "epoch": 1, "live_version": None, "rollback_to": None, "update": None}
    fleet = FleetState.model_validate(
        {**state, "fleet": "f", "sources_needed": [], "members": [], "hold": new, "refused": [new]}
    )
    assert fleet.refused == [fleet.hold] == [Failure("internal", "x", replica="r1", rank=2)]
    read = TypeAdapter(ToldGroup).validate_python(group)
    assert (read.code, read.count, read.examples) == ("from_the_future", 9, (fleet.hold,))
    for odd in (7, {}, {"code": [], "message": "x", "rank": "two"}):
        with pytest.raises(ValueError):
            FleetState.model_validate({**fleet.model_dump(), "hold": odd})


@pytest.mark.case("F26")
def test_a_document_holds_a_bounded_list_and_its_text_is_that_of_the_exception() -> None:
    failures = [
        Failure("tensor_narrowing", "F32 into BF16", rank=number % 2, tensor=f"t{number}") for number in range(250)
    ]
    error = Rejected(*failures, live_version="0-1")
    document = problems.problem_body(error)
    assert (len(document["failures"]), document["failures_count"]) == (100, 250)
    assert [(group["code"], group["count"], group["tensors"]) for group in document["groups"]] == [
        ("tensor_narrowing", 250, 250)
    ]
    assert document["hint"] == error.hint != ""
    heard = problems.error_of(422, document)
    assert str(heard) == document["detail"] == str(error)
    assert (heard.groups, heard.retryable, heard.hint) == (error.groups, error.retryable, error.hint)
    assert problems.problem_body(heard)["failures_count"] == 250


def test_a_document_of_another_release_is_grouped_by_the_reader() -> None:
    old = {"failures": [{"code": "busy", "message": "x"}, {"code": "busy", "message": "x"}]}
    strange = {**old, "groups": [{"code": "busy", "count": "many"}], "retryable": "perhaps"}
    unknown = {**old, "groups": [{"code": "busy", "count": 2, "examples": [{"code": "of 2030", "message": ""}]}]}
    for document in (old, strange, unknown):
        error = problems.error_of(409, document)
        assert [(group.code, group.count) for group in error.groups] == [("busy", 2)]
        assert error.retryable


LOCAL = ("127.0.0.1:8700", "localhost", "LOCALHOST:1", "[::1]:8700", "127.8.8.8")
ELSEWHERE = ("evil.example", "evil.example:8700", "127.0.0.1.evil.example", "0.0.0.0:8700", "192.168.1.1", "[::2]", "")


@pytest.mark.case("F41")
@pytest.mark.parametrize(
    ("headers", "status"),
    [({"host": name}, 200) for name in LOCAL]
    + [({"host": name}, 403) for name in ELSEWHERE]
    + [({"origin": f"http://{name}"}, 200) for name in LOCAL]
    + [({"origin": origin}, 403) for origin in ("http://evil.example", "null", "https://localhost.evil.example", "x")],
)
def test_without_a_token_a_page_from_elsewhere_is_refused(headers: dict[str, str], status: int) -> None:
    """By the name that it was called by (DNS rebinding), and by the page that calls."""
    answer = ask("GET", "/v1/open", **headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["code"] == "forbidden"
        assert ADMIN_ENV in answer.json()["failures"][0]["hint"]
        assert ask("GET", "/healthz", **headers).status_code == 200
        # With a token it is the token that decides.
        assert ask("GET", "/v1/open", tokens=BOTH, token=INFERENCE, **headers).status_code == 200


@pytest.mark.case("F41")
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/merge-patch+json", 200),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("text/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("json", 415),
        ("", 415),
        (None, 415),
    ],
)
def test_a_body_has_to_call_itself_json(kind: str | None, status: int) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = ask("POST", "/v1/echo", content=b'{"number": 1}', **headers)
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["code"] == "unsupported_media_type"
        assert "application/json" in answer.json()["failures"][0]["hint"]


@pytest.mark.case("F41")
def test_two_content_types_are_none_and_no_body_needs_none() -> None:
    async def run() -> int:
        transport = httpx.ASGITransport(app(Tokens()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = [("content-type", "application/json"), ("content-type", "text/plain")]
            return (await client.post("/v1/echo", content=b'{"number": 1}', headers=headers)).status_code

    assert asyncio.run(run()) == 415
    assert ask("POST", "/v1/fails/known").status_code == 405
