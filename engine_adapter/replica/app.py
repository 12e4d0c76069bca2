"""The HTTP app of one replica: participant contract, operator verbs, completions, health, metrics.

Answers from the first moment on, also while the model loads: it is then shut and says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from engine_adapter.replica.admission import AdmissionController, Gate
from engine_adapter.replica.completions import Completions, ModelText
from engine_adapter.replica.front import Front
from updater.core.errors import Failure, Unavailable, refuse
from updater.core.participant import MESSAGES, FrontState, FrontStatus, ReleaseTo
from updater.protocol import wire
from updater.server import guard
from updater.server.security import FrontKeys, Tokens

#: Opened by the inference token; everything else needs the admin token.
INFERENCE_PATHS = frozenset({"/v1/completions", "/v1/models", "/v1/version"})
#: A plan may bring its manifest: 150,000 tensors are about 20 MB.
PARTICIPANT_BODY = 64 << 20
COMPLETION_BODY = 16 << 20
OPERATOR_BODY = 4 << 10
#: In the OpenAPI document, of routes that read their messages themselves.
JSON_BODY = {"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}}


class ReplicaApp:
    """Everything that HTTP may reach. `front` is set when the start checkpoint was admitted."""

    def __init__(self, replica: str, gate: AdmissionController) -> None:
        self.replica = replica
        self.front: Front | None = None
        self.failure: Failure | None = None
        self.obstacle: Callable[[], Failure | None] = lambda: None  # why its coordinator does not admit it
        self._gate = gate

    @property
    def live_version(self) -> str | None:
        return self.front.state.live.version if self.front is not None else None

    def digest_of(self, version: str) -> str:
        return self.front.digest_of(version) if self.front is not None else ""

    async def participant(self, verb: str, request: Request) -> Response:
        """`POST /participant/v1/{verb}`: the request as JSON in, the reply as JSON out."""
        if verb not in MESSAGES:
            raise refuse("not_found", f"no verb {verb!r}")
        kind, _ = MESSAGES[verb]
        try:
            message: Any = wire.decode(kind, await request.body() or b"{}")
        except (wire.WireError, ValueError) as error:
            raise refuse("bad_request", str(error)) from None
        reply = await self._ready().ask(verb, message)
        return Response(wire.encode(reply), media_type="application/json")

    async def readmit(self) -> Response:
        """`POST /replica/v1/readmit`: an operator's word for a quarantined replica; answers with its status."""
        return _status(await self._ready().readmit())

    async def release(self, request: Request) -> Response:
        """`POST /replica/v1/release` with `{"to": "live" | "previous"}`: where the coordinator is gone for long."""
        try:
            body = json.loads(await request.body() or b"{}")
            to = ReleaseTo(body["to"])
        except (ValueError, TypeError, KeyError):
            raise refuse("bad_request", 'needs {"to": "live"} or {"to": "previous"}') from None
        return _status(await self._ready().release(to))

    def _ready(self) -> Front:
        if self.front is None:
            why = self.failure or Failure("shut", "the start checkpoint is still being loaded and proved")
            raise Unavailable(why.at(replica=self.replica))
        return self.front

    async def healthz(self) -> JSONResponse:
        return JSONResponse({"ok": True, "replica": self.replica, "state": self.state})

    async def readyz(self) -> Response:
        if self.front is not None and self.front.ready:
            state = self.front.state
            return JSONResponse({"ready": True, "version": self.live_version, "unclaimed": state.unclaimed})
        why = (self.front.state.failure if self.front is not None else self.failure) or self.obstacle()
        hint = why.hint if why else ""
        text = f"{self.state}: {why.message if why else 'not open'}"
        failure = Failure("shut", text, replica=self.replica, hint=hint)
        causes = () if why is None else (why,)
        return guard.problem(Unavailable(failure, *causes, live_version=self.live_version))

    async def version(self) -> JSONResponse:
        front = self._ready()
        live, spare = front.state.live, front.state.spare
        return JSONResponse(
            {
                "version": live.version,
                "digest": live.digest,
                "state": self.state,
                "replica": self.replica,
                "spare": wire.plain(spare),
                "released": wire.plain(front.state.released),
                "fleet": front.state.fleet,
                "epoch": front.state.epoch,
                "unclaimed": front.state.unclaimed,
            }
        )

    @property
    def state(self) -> str:
        return (self.front.state.state if self.front is not None else FrontState.JOINING).value

    async def metrics(self) -> Response:
        registry = CollectorRegistry()
        registry.register(_Snapshot(self._families))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def _families(self) -> list[Any]:
        gauges = {
            "in_flight": ("Requests that run", self._gate.in_flight),
            "waiting": ("Requests that wait at a shut gate", self._gate.waiting),
            "open": ("1 while requests are admitted", int(self._gate.is_open)),
        }
        families: list[Any] = [
            GaugeMetricFamily(f"liveweights_replica_{name}", text, value=value)
            for name, (text, value) in gauges.items()
        ]
        states = GaugeMetricFamily("liveweights_replica_state", "1 for the state it is in", labels=["state"])
        states.add_metric([self.state], 1)
        version = GaugeMetricFamily("liveweights_replica_version", "1 for the version that is live", labels=["version"])
        version.add_metric([self.live_version or ""], 1)
        mixed = CounterMetricFamily("liveweights_replica_mixed_tokens", "Tokens refused for their version")
        mixed.add_metric([], self._gate.mixed)
        return [*families, states, version, mixed]


def _status(status: FrontStatus) -> Response:
    return Response(wire.encode(status), media_type="application/json")


class _Snapshot(Collector):
    """Values are read when they are asked for: nothing is counted twice."""

    def __init__(self, families: Callable[[], list[Any]]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families()


def make_app(face: ReplicaApp, gate: Gate, text: ModelText, tokens: Tokens, url: str = "") -> FastAPI:
    """`url`: the address that this replica announces; its coordinator shows the key that is made of it."""
    app = FastAPI(
        title="liveweights replica",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        responses=guard.problem_responses(),
    )
    app.include_router(Completions(gate, text, face.digest_of).router())
    app.add_api_route(
        "/participant/v1/{verb}", face.participant, methods=["POST"], response_model=None, openapi_extra=JSON_BODY
    )
    add_operator_routes(app, face)
    app.add_api_route("/healthz", face.healthz, methods=["GET"], response_model=None)
    app.add_api_route("/readyz", face.readyz, methods=["GET"], response_model=None)
    app.add_api_route("/v1/version", face.version, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", face.metrics, methods=["GET"], response_model=None, response_class=Response)
    guard.install(
        app,
        tokens=tokens,
        inference_paths=INFERENCE_PATHS,
        body_limits={
            "/participant/v1/": PARTICIPANT_BODY,
            "/replica/v1/": OPERATOR_BODY,
            "/v1/completions": COMPLETION_BODY,
        },
        live_version=lambda: face.live_version,
        keys=FrontKeys.of(tokens, face.replica, url),
    )
    return app


def add_operator_routes(app: FastAPI, face: ReplicaApp) -> None:
    """What a person may ask of one replica. Admin scope: `guard.install` knows no other path for them."""
    app.add_api_route("/replica/v1/readmit", face.readmit, methods=["POST"], response_model=None)
    app.add_api_route(
        "/replica/v1/release", face.release, methods=["POST"], response_model=None, openapi_extra=JSON_BODY
    )
