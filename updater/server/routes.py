"""The coordinator's public HTTP API: routes in, problem documents and receipts out. Decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from updater.coordinator.coordinator import Coordinator
from updater.coordinator.updates import Update
from updater.coordinator.watching import WatchedEvent
from updater.core.errors import IN_DOCUMENT, Failure, Unavailable
from updater.core.participant import Call, Claimed
from updater.protocol.answers import (
    DtypesState,
    FleetState,
    MemberState,
    ModelState,
    Receipt,
    UpdateState,
    VersionState,
)
from updater.protocol.api import AbortBody, AdoptBody, ClaimBody, JoinBody, RollbackRequest, SealBody, UpdateRequest
from updater.protocol.events import EVENT_STREAM
from updater.protocol.problems import receipt_error
from updater.server import guard
from updater.server.metrics import CONTENT_TYPE

#: What an inference client may see.
INFERENCE_PATHS = frozenset({"/v1/version"})
KEEP_ALIVE_S = 10.0


def create_app(coordinator: Coordinator) -> FastAPI:
    """The app of a coordinator that somebody starts and closes, on the event loop that serves the app."""
    app = FastAPI(title="liveweights coordinator", responses=guard.problem_responses())
    routes = _Routes(coordinator)
    routes.add_updates(app)
    routes.add_fleet(app)
    routes.add_health(app)
    guard.install(
        app,
        tokens=coordinator.settings.tokens,
        inference_paths=INFERENCE_PATHS,
        max_body=coordinator.settings.max_body,
        # A seal may bring a digest for every tensor of a manifest.
        body_limits=dict.fromkeys(("/v1/manifests/", "/v1/updates/"), coordinator.settings.max_manifest),
        live_version=lambda: coordinator.live_version,
    )
    return app


class _Routes:
    """One method per route."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._updates = coordinator, coordinator.updates

    def add_updates(self, app: FastAPI) -> None:
        update = "/v1/updates/{update_id}"
        ended: dict[int | str, dict[str, Any]] = {
            200: {"model": Receipt, "description": "It was waited for: committed, or planned where that was asked."}
        }
        app.post("/v1/updates", status_code=202, response_model=UpdateState, responses=ended)(self.begin)
        app.post("/v1/rollback", status_code=202, response_model=UpdateState, responses=ended)(self.rollback)
        app.get(update, response_model=UpdateState)(self.state)
        app.get(f"{update}/events", response_class=StreamingResponse)(self.events)
        app.post(f"{update}/renew", response_model=UpdateState)(self.renew)
        app.post(f"{update}/seal", response_model=UpdateState)(self.seal)
        app.post(f"{update}/commit", status_code=202, response_model=UpdateState)(self.commit)
        app.post(f"{update}/abort", status_code=202, response_model=UpdateState)(self.abort)
        app.put("/v1/manifests/{digest}", status_code=201)(self.put_manifest)
        app.get("/v1/manifests/{digest}")(self.get_manifest)

    def add_fleet(self, app: FastAPI) -> None:
        app.get("/v1/version", response_model=VersionState)(self.version)
        app.get("/v1/fleet", response_model=FleetState)(self.fleet)
        app.get("/v1/fleet/dtypes", response_model=DtypesState)(self.dtypes)
        app.get("/v1/history")(self.history)
        app.post("/v1/fleet/replicas", status_code=201, response_model=MemberState)(self.join)
        app.get("/v1/fleet/replicas/{replica}", response_model=MemberState)(self.member)
        app.post("/v1/fleet/replicas/{replica}/claim", response_model=Claimed)(self.claim)
        app.delete("/v1/fleet/replicas/{replica}", status_code=204, response_class=Response)(self.leave)
        app.get("/v1/fleet/model", response_model=ModelState)(self.model)
        app.post("/v1/fleet/adopt", response_model=FleetState)(self.adopt)

    def add_health(self, app: FastAPI) -> None:
        app.get("/healthz")(self.healthz)
        app.get("/readyz")(self.readyz)
        app.get("/metrics", response_class=Response)(self.metrics)

    # -- updates

    async def begin(self, body: UpdateRequest, wait: Annotated[bool, Query()] = False) -> Response:
        return await self._answer(self._updates.begin_update(body), wait)

    async def rollback(self, body: RollbackRequest, wait: Annotated[bool, Query()] = False) -> Response:
        return await self._answer(self._updates.begin_rollback(body), wait)

    async def _answer(self, update: Update, wait: bool) -> Response:
        if not wait:
            state = self._updates.view(update)
            headers = {"Location": f"/v1/updates/{update.id}"}
            return JSONResponse(state.model_dump(mode="json"), 202, headers)
        await update.done.wait()
        return self._ended(update)

    def _ended(self, update: Update) -> Response:
        """200 only for committed, or planned of a dry run; every other end is a problem that carries the receipt."""
        receipt = update.receipt
        if receipt is None:
            failure = self._coordinator.stopped or Failure("shut", "the coordinator ended")
            raise Unavailable(failure, live_version=self._coordinator.live_version)
        document = receipt.model_dump(mode="json")
        error = receipt_error(receipt, self._coordinator.live_version)
        if error is None:
            return JSONResponse(document)
        # The list of the failures is the document's own; all that is kept of it is at GET /v1/updates/{id}.
        return guard.problem(error, receipt={**document, "failures": document["failures"][:IN_DOCUMENT]})

    async def state(self, update_id: str) -> UpdateState:
        return self._updates.view(self._updates.find(update_id))

    async def renew(self, update_id: str) -> UpdateState:
        return self._updates.view(self._updates.renew(update_id))

    async def seal(self, update_id: str, body: SealBody | None = None) -> UpdateState:
        return self._updates.view(self._updates.seal(update_id, body.digests if body is not None else {}))

    async def commit(self, update_id: str) -> UpdateState:
        return self._updates.view(self._updates.commit(update_id))

    async def abort(self, update_id: str, body: AbortBody | None = None) -> UpdateState:
        causes = body.failures if body is not None else []
        failures = tuple(Failure(**{**cause.model_dump(), "replica": cause.replica or ""}) for cause in causes)
        return self._updates.view(self._updates.abort(update_id, failures))

    async def events(self, update_id: str) -> StreamingResponse:
        update = self._updates.find(update_id)
        return StreamingResponse(self._stream(update), media_type=EVENT_STREAM, headers={"Cache-Control": "no-store"})

    async def _stream(self, update: Update) -> AsyncIterator[str]:
        """The state now, every change, the receipt; comments while nothing happens."""
        events = update.events
        position = events.join()
        try:
            state = self._updates.view(update).model_dump(mode="json", exclude={"receipt"})
            yield WatchedEvent("phase", state).text
            if update.done.is_set():
                if update.receipt is not None:
                    yield WatchedEvent("receipt", update.receipt).text
                return
            async for event in events.after(position, KEEP_ALIVE_S):
                yield event.text if event is not None else ": waiting\n\n"
        finally:
            events.leave()

    async def put_manifest(self, digest: str, request: Request) -> dict[str, str]:
        return {"digest": self._coordinator.updates.put_manifest(digest, await request.body())}

    async def get_manifest(self, digest: str) -> Response:
        return Response(self._coordinator.updates.manifest(digest), media_type="application/json")

    # -- fleet

    async def version(self) -> VersionState:
        return self._coordinator.version()

    async def fleet(self) -> FleetState:
        return self._coordinator.fleet()

    async def dtypes(self) -> DtypesState:
        return self._coordinator.dtypes()

    async def model(self) -> ModelState:
        return await self._coordinator.model()

    async def history(self, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, list[Receipt]]:
        return {"receipts": self._updates.history(limit)}

    async def join(self, body: JoinBody) -> MemberState:
        return await self._coordinator.joins.join(body.replica, body.url.rstrip("/"))

    async def member(self, replica: str) -> MemberState:
        return self._coordinator.member(replica)

    async def claim(self, replica: str, body: ClaimBody) -> Claimed:
        """Asked by a front of itself, every few seconds."""
        call = Call(replica, **body.model_dump(exclude={"url"}))
        return self._coordinator.claim(call, body.url.rstrip("/"))

    async def leave(
        self,
        replica: str,
        confirm_dead: Annotated[bool, Query()] = False,
        incarnation: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
    ) -> Response:
        await self._coordinator.joins.leave(replica, confirm_dead, incarnation)
        return Response(status_code=204)

    async def adopt(self, body: AdoptBody) -> FleetState:
        await self._coordinator.adopt([(member.replica, member.url.rstrip("/")) for member in body.members])
        return self._coordinator.fleet()

    # -- health

    async def healthz(self) -> dict[str, str]:
        return {"status": "alive"}

    async def readyz(self) -> Response:
        if self._coordinator.ready:
            return JSONResponse({"status": "ready"})
        none_serves = Failure("no_members", "no replica serves yet")
        why = self._coordinator.stopped or self._coordinator.state.hold
        whys = (why,) if why else (none_serves, *self._coordinator.obstacles()[:IN_DOCUMENT])
        problem = guard.problem(Unavailable(*whys))
        problem.status_code = 503  # whatever the code means elsewhere
        return problem

    async def metrics(self) -> Response:
        live = self._coordinator.state.live
        states = [member.state for member in self._coordinator.members()]
        text = self._coordinator.metrics.render(live.label.version if live is not None else None, states)
        return Response(text, media_type=CONTENT_TYPE)
