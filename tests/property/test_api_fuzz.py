"""The HTTP faces against their own OpenAPI documents, by schemathesis: each answer is one that the document declares.

Real servers on real sockets. Answers of 5xx are only the documented 503, as a problem document.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import uvicorn
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from engine_adapter.replica.admission import Gate
from engine_adapter.replica.app import ReplicaApp, make_app
from engine_adapter.replica.completions import ModelText
from updater.coordinator.clock import LoopClock
from updater.core.participant import MESSAGES
from updater.ray.local_app import LoopThread
from updater.server import guard as http
from updater.server.routes import create_app
from updater.server.security import Tokens
from updater.testing.service import LocalService

pytestmark = [pytest.mark.case("F43"), pytest.mark.slow]
SOAK = os.environ.get("LIVEWEIGHTS_EXAMPLES") == "soak"
BOUNDED = settings(
    max_examples=40 if SOAK else 6,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
STATEFUL = settings(BOUNDED, max_examples=40 if SOAK else 6, stateful_step_count=8)
DECLARED = [status_code_conformance, content_type_conformance, response_schema_conformance]
TIMEOUT_S = 60


class Served:
    """An app on a socket, on an event loop of its own."""

    def __init__(self, loop: LoopThread, app: FastAPI) -> None:
        self._loop = loop
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._serving = loop.submit(self._server.serve(sockets=[self._listener]))

    def close(self) -> None:
        self._server.should_exit = True
        self._serving.result(TIMEOUT_S)
        self._listener.close()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document of a coordinator with one member, which serves."""
    loop, folder = LoopThread("coordinator"), tmp_path_factory.mktemp("coordinator")
    service = loop.submit(_started(folder)).result(TIMEOUT_S)
    served = Served(loop, create_app(service.coordinator))
    try:
        yield _schema(served.url, create_app(service.coordinator).openapi())
    finally:
        served.close()
        loop.submit(service.__aexit__(None, None, None)).result(TIMEOUT_S)


async def _started(folder: Path) -> LocalService:
    service = LocalService(folder, clock=LoopClock())
    await service.__aenter__()
    front = service.fleet.add("one")
    answer = await service.post("/v1/fleet/replicas", {"replica": front.replica, "url": front.url})
    assert answer.status_code == 201, answer.text
    return service


class _NoEngine:
    def submit(self, request: Any) -> asyncio.Future[Any]:
        raise AssertionError("the gate is shut")

    def cancel(self, request_id: str) -> None:
        raise AssertionError("the gate is shut")


@pytest.fixture(scope="module")
def front() -> Iterator[Any]:
    """The document of a front whose ranks still load."""
    loop = LoopThread("front")

    async def made() -> FastAPI:
        gate = Gate(_NoEngine())
        text = ModelText("toy", None, (), 256, 64)
        return make_app(ReplicaApp("one", gate), gate, text, Tokens())

    app = loop.submit(made()).result(TIMEOUT_S)
    served = Served(loop, app)
    try:
        document = app.openapi()
        (verb,) = document["paths"]["/participant/v1/{verb}"]["post"]["parameters"]
        verb["schema"]["enum"] = sorted(MESSAGES)  # any other word is a 404, and says nothing of messages
        yield _schema(served.url, document)
    finally:
        served.close()


def _schema(url: str, document: dict[str, Any]) -> Any:
    schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig())
    schema.config.update(base_url=url)
    # A stream of events of an update that waits for its client has no end.
    return schema.exclude(path_regex="/events$")


def answered(case: Any) -> None:
    """Ask, and look at the answer."""
    if case.query:
        case.query.pop("wait", None)  # the answer would wait for other clients
    response = case.call(timeout=TIMEOUT_S)
    if response.status_code >= 500:
        assert response.status_code == 503, response.text
        assert response.headers["content-type"] == [http.MEDIA_TYPE]
    case.validate_response(response, checks=DECLARED)


def ask_everything(schema: Any) -> int:
    """Every operation of a document, with what fits it and with what does not. Returns how many there are."""
    count = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            # Of some operations everything fits: any word in a path, and no body.
            with suppress(Unsatisfiable) if mode is schemathesis.GenerationMode.NEGATIVE else nullcontext():
                BOUNDED(given(case=operation.as_strategy(generation_mode=mode))(answered))()
        count += 1
    return count


def test_the_coordinator_answers_as_its_document_says(coordinator: Any) -> None:
    assert ask_everything(coordinator) >= 18


def test_a_front_answers_as_its_document_says(front: Any) -> None:
    assert ask_everything(front) >= 9


def test_the_coordinator_does_so_in_any_order(coordinator: Any) -> None:
    machine = coordinator.as_state_machine()

    class Ordered(machine):  # type: ignore[misc, valid-type]
        def validate_response(self, response: Any, case: Any, additional_checks: Any = (), **options: Any) -> None:
            if response.status_code >= 500:
                assert response.status_code == 503, response.text
            case.validate_response(response, checks=DECLARED)

        def before_call(self, case: Any) -> None:
            if case.query:
                case.query.pop("wait", None)

    Ordered.run(settings=STATEFUL)
