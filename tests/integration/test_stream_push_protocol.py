"""A pushed stream as the coordinator keeps it: the offer, the lease, the seal, and what a restart makes of it.

The coordinator is the real one on its HTTP face; the fronts are simulated, and time passes when it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from updater.core.participant import StreamOffer
from updater.protocol.manifest import Manifest
from updater.protocol.wire import build
from updater.settings import Deadlines
from updater.testing.fronts import ManualClock, SimulatedFleet, SimulatedFront, settle
from updater.testing.service import LocalService

JSON = {"content-type": "application/json"}

DIGEST, OTHER = "0" * 16, "1" * 16
DEADLINES = Deadlines(shutdown_s=1.0, status_s=1.0, retry_first_s=0.01)


def manifest(count: int = 2, digest: str = "") -> dict[str, Any]:
    tensors = [{"name": f"t{n:06d}", "dtype": "F32", "shape": [1], "digest": digest} for n in range(count)]
    return {"tensors": tensors}


class Streams:
    """A coordinator with two members on 0-7, and streams into them. `restart` is another life of the coordinator."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.clock, self.settings = folder, ManualClock(), settings
        self.fleet = SimulatedFleet(self.clock)
        self.service = self._make()
        self.fronts: list[SimulatedFront] = []

    def _make(self) -> LocalService:
        more = self.settings
        return LocalService(self.folder, fleet=self.fleet, clock=self.clock, deadlines=DEADLINES, **more)

    async def start(self) -> None:
        await self.service.coordinator.start()
        self.fronts = await self.service.join("one", "two")
        assert (await self.service.push(7)).status_code == 200

    async def restart(self) -> None:
        await self.service.crash()
        await self.service.http.aclose()
        self.service = self._make()
        await self.service.coordinator.start()
        await settle()

    async def begin(self, step: int, **body: Any) -> httpx.Response:
        address = self.service.checkpoint(f"stream-{step}")  # simulated ranks find there what a sender would send
        source = {"kind": "broadcast", "address": address, "session": "s"}
        asked = {"version": step, "id": f"u{step}", "source": source, "manifest": manifest(), **body}
        answer = await self.service.post("/v1/updates", asked)
        await settle()
        return answer

    async def verb(self, name: str, body: Any = None, step: int = 8) -> httpx.Response:
        answer = await self.service.post(f"/v1/updates/u{step}/{name}", body)
        await settle()
        return answer

    async def state(self, step: int = 8) -> dict[str, Any]:
        state: dict[str, Any] = (await self.service.get(f"/v1/updates/u{step}")).json()
        return state

    async def goes_on(self) -> None:
        """Every member is open and the next stream is published."""
        assert {front.serving for front in self.fronts} == {await self.service.live()}
        assert (await self.begin(20)).status_code == 202
        assert (await self.verb("seal", step=20)).status_code == 200
        assert await self.service.live() == "0-20"


def play(folder: Path, story: Callable[[Streams], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        streams = Streams(folder, **settings)
        await streams.start()
        try:
            await story(streams)
        finally:
            await streams.service.http.aclose()
            await streams.service.coordinator.close()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_the_offer_is_there_from_staging_on_and_gone_at_the_end(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        streams.fronts[0].hold["plan"] = asyncio.Event()
        await streams.begin(8)
        assert ((await streams.state())["phase"], (await streams.state())["offer"]) == ("planning", None)
        streams.fronts[0].hold.pop("plan").set()
        await settle()
        state = await streams.state()
        assert state["phase"] == "staging"
        seats = [(seat["replica"], seat["first"], seat["ranks"]) for seat in state["offer"]["seats"]]
        assert seats == [("one", 0, 1), ("two", 1, 1)]
        staged = [request for verb, request in streams.fronts[1].calls if verb == "plan"][-1]
        assert isinstance(staged.offer, StreamOffer)
        assert [seat["incarnation"] for seat in state["offer"]["seats"]] == [s.incarnation for s in staged.offer.seats]
        await streams.verb("seal")
        assert (await streams.state())["offer"] is None
        assert await streams.service.live() == "0-8"

    play(tmp_path, story)


def test_a_seal_may_be_repeated_and_may_not_contradict(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        streams.fronts[0].hold["verify"] = asyncio.Event()
        await streams.begin(8, manifest=manifest(2, DIGEST))
        wrong = await streams.verb("seal", {"digests": {"t000000": OTHER}})
        assert (wrong.status_code, wrong.json()["code"]) == (422, "manifest_mismatch")
        unknown = await streams.verb("seal", {"digests": {"x": OTHER}})
        assert (unknown.status_code, unknown.json()["failures"][0]["tensor"]) == (422, "x")
        assert (await streams.state())["phase"] == "staging"
        for _ in range(2):
            assert (await streams.verb("seal", {"digests": {"t000000": DIGEST}})).status_code == 200
            assert (await streams.state())["phase"] == "verifying"
        assert [verb for verb, _request in streams.fronts[1].calls].count("verify") == 2  # of 0-7 and of this
        streams.fronts[0].hold.pop("verify").set()
        await settle()
        assert await streams.service.live() == "0-8"

    play(tmp_path, story)


def test_nobody_has_to_come_back_after_the_seal_and_a_late_renewal_does_no_harm(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        streams.fronts[0].hold["verify"] = asyncio.Event()
        await streams.begin(8, lease_s=5.0)
        await streams.verb("seal")
        await streams.service.advance(60.0)
        assert ((await streams.verb("renew")).status_code, (await streams.state())["lease_left_s"]) == (200, None)
        streams.fronts[0].hold.pop("verify").set()
        await settle()
        assert await streams.service.live() == "0-8"

    play(tmp_path, story)


def test_a_manual_commit_keeps_its_lease_after_the_seal(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        await streams.begin(8, lease_s=5.0, policy={"commit": "manual"})
        await streams.verb("seal")
        await streams.service.advance(4.0)
        assert (await streams.verb("renew")).status_code == 200
        await streams.service.advance(4.0)
        assert (await streams.state())["phase"] == "ready"
        await streams.service.advance(1.5)
        assert (await streams.state())["receipt"]["reason"] == "lease_expired"
        await streams.goes_on()

    play(tmp_path, story)


@pytest.mark.parametrize("end", ["abort", "lease"])
def test_a_seal_that_comes_after_the_end_is_told_so(tmp_path: Path, end: str) -> None:
    async def story(streams: Streams) -> None:
        await streams.begin(8, lease_s=5.0)
        if end == "abort":
            await streams.verb("abort")
        else:
            await streams.service.advance(5.0)
        for verb in ("seal", "renew"):
            late = await streams.verb(verb)
            code = "wrong_phase" if end == "abort" else "lease_expired"
            assert (late.status_code, late.json()["code"]) == (409, code)
        receipt = (await streams.state())["receipt"]
        assert receipt["outcome"] == "aborted"
        assert receipt["reason"] == ("client_abort" if end == "abort" else "lease_expired")
        assert (await streams.state())["offer"] is None
        await streams.goes_on()

    play(tmp_path, story)


def test_a_stream_that_waits_for_another_update_lives_by_its_lease(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        await streams.begin(8)
        await streams.begin(9, policy={"on_busy": "wait"}, lease_s=5.0)
        await streams.begin(10, policy={"on_busy": "wait"}, lease_s=50.0)
        assert ((await streams.state(9))["phase"], (await streams.state(9))["offer"]) == ("queued", None)
        await streams.service.advance(6.0)
        assert (await streams.state(9))["receipt"]["reason"] == "lease_expired"
        await streams.verb("seal")
        assert (await streams.state(10))["phase"] == "staging"
        await streams.verb("seal", step=10)
        assert await streams.service.live() == "0-10"

    play(tmp_path, story)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_coordinator_that_restarts_in_mid_stream_aborts_it(tmp_path: Path, sealed: bool) -> None:
    """Its sender is told when it comes back, with the receipt; nothing is paused, and the next stream works."""

    async def story(streams: Streams) -> None:
        for front in streams.fronts:
            front.hold["verify"] = asyncio.Event()
        await streams.begin(8)
        if sealed:
            await streams.verb("seal", {"digests": {"t000000": DIGEST}})
        await streams.restart()
        for front in streams.fronts:
            front.hold.pop("verify").set()
        await settle()
        late = await streams.verb("renew")
        assert (late.status_code, late.json()["code"]) == (409, "wrong_phase")
        receipt = (await streams.state())["receipt"]
        assert (receipt["outcome"], receipt["reason"]) == ("aborted", "coordinator_restarted")
        assert all(front.asked("discard") for front in streams.fronts)
        assert await streams.service.live() == "0-7"
        await streams.service.advance(10.0)
        await streams.goes_on()

    play(tmp_path, story)


def test_a_member_that_is_removed_in_mid_stream_ends_it(tmp_path: Path) -> None:
    """A stream is for the receivers that were seated; the next one is for those that are left."""

    async def story(streams: Streams) -> None:
        two = streams.fronts[1]
        two.hold["stage"] = asyncio.Event()
        await streams.begin(8)
        two.deaf = True
        gone = await streams.service.http.delete("/v1/fleet/replicas/two", params={"confirm_dead": "true"})
        await settle()
        assert gone.status_code == 204
        receipt = (await streams.state())["receipt"]
        assert (receipt["outcome"], [failure["replica"] for failure in receipt["failures"]]) == ("aborted", ["two"])
        streams.fronts.remove(two)
        await streams.goes_on()

    play(tmp_path, story)


def test_a_seal_may_be_as_large_as_a_manifest(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        promised = build(Manifest, manifest(200))
        path = f"/v1/manifests/{promised.digest}"
        assert (await streams.service.http.put(path, content=promised.to_json(), headers=JSON)).status_code == 201
        await streams.begin(8, manifest=promised.digest)
        sealed = await streams.verb("seal", {"digests": {entry.name: DIGEST for entry in promised.tensors}})
        assert sealed.status_code == 200
        assert await streams.service.live() == "0-8"

    play(tmp_path, story, max_body=2000)
