"""Delivery to fronts: tried again until answered, superseded or forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from updater.coordinator.members.participants import Refusal, Unreachable
from updater.coordinator.outbox import SLACK_S, Outbox
from updater.core.errors import Failure
from updater.core.fleet.effects import Send
from updater.core.fleet.events import Event, Refused, Replied
from updater.core.participant import Ack, Fence, FenceRequest, PauseRequest, StageRequest
from updater.core.policy import InFlight
from updater.settings import Deadlines
from updater.testing.fronts import ManualClock, settle


def send(verb: str = "install", serial: int = 1, replica: str = "one") -> Send:
    return Send(replica, verb, FenceRequest(Fence("f", 1, serial, 1, "i")))


class Scripted:
    """Answers each call with the next of its lines: a reply, an exception, or an event to wait for."""

    url = "http://scripted.test"

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.calls: list[tuple[str, int, float]] = []
        self.cancelled = 0

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        self.calls.append((verb, request.fence.serial, timeout_s))
        line = self.script.pop(0)
        if isinstance(line, asyncio.Event):
            try:
                await line.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return Ack(request.fence)
        if isinstance(line, Exception):
            raise line
        return line

    async def close(self) -> None:
        pass


class Desk:
    """What the outbox reports to."""

    def __init__(self, *script: Any) -> None:
        self.clock, self.front = ManualClock(), Scripted(*script)
        self.fed: list[Event] = []
        self.silent: list[tuple[str, bool]] = []
        deadlines = Deadlines(retry_first_s=1.0, retry_most_s=4.0, install_s=11.0, resume_s=12.0)
        self.outbox = Outbox(
            self.clock,
            deadlines,
            lambda replica: self.front if replica == "one" else None,
            self.fed.append,
            lambda replica, refused: self.silent.append((replica, refused)),
        )


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_tried_again_with_growing_gaps_until_there_is_an_answer() -> None:
    async def scenario() -> None:
        wanted = send()
        silence = [
            Unreachable("no"),
            Unreachable("no", refused=True),
            OSError("odd"),
            Unreachable("no"),
            Unreachable("no"),
        ]
        desk = Desk(*silence, Ack(wanted.fence))
        desk.outbox.send(wanted)
        counts = []
        for seconds in (0, 0.9, 0.2, 1.8, 0.2, 3.8, 0.2, 3.8, 0.2):
            await desk.clock.advance(seconds)
            counts.append(len(desk.front.calls))
        assert counts == [1, 1, 2, 2, 3, 3, 4, 4, 5]  # after 1, 2, 4 and again 4 seconds
        assert desk.fed == []
        await desk.clock.advance(10)
        assert desk.fed == [Replied("one", "install", wanted.fence, Ack(wanted.fence))]
        assert desk.silent == [("one", False), ("one", True), ("one", False), ("one", False)]

    run(scenario)


def test_a_refusal_is_an_answer() -> None:
    async def scenario() -> None:
        failures = (Failure("rank_failed", "no"),)
        desk = Desk(Refusal(failures))
        desk.outbox.send(send())
        await desk.clock.advance(60)
        assert desk.fed == [Refused("one", "install", send().fence, failures)]
        assert len(desk.front.calls) == 1

    run(scenario)


def test_a_later_message_takes_the_place_of_an_earlier_one() -> None:
    async def scenario() -> None:
        desk = Desk(asyncio.Event(), Ack(send("restore").fence))
        desk.outbox.send(send())
        await settle()
        desk.outbox.send(send("restore"))
        await settle()
        assert desk.front.cancelled == 1
        assert [event.verb for event in desk.fed if isinstance(event, Replied)] == ["restore"]

    run(scenario)


def test_a_forgotten_one_is_not_tried_any_more_and_close_leaves_no_task() -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        desk = Desk(Unreachable("no"), Ack(send().fence))
        desk.outbox.send(send())
        await settle()
        desk.outbox.forget("one")
        await desk.clock.advance(60)
        assert len(desk.front.calls) == 1
        desk.outbox.send(send(replica="nobody"))
        await settle()
        await desk.outbox.close()
        assert asyncio.all_tasks() == before
        assert desk.fed == []

    run(scenario)


def test_an_answer_may_lead_to_the_next_message_at_once() -> None:
    """The task that feeds is over by then: the next send must not cancel it in the middle."""

    async def scenario() -> None:
        one, two = send(serial=1), send("invalidate", serial=1)
        desk = Desk(Ack(one.fence), Ack(two.fence))
        fed: list[str] = []

        def feed(event: Event) -> None:
            assert isinstance(event, Replied)
            if event.verb == "install":
                desk.outbox.send(two)
            fed.append(event.verb)

        desk.outbox._feed = feed
        desk.outbox.send(one)
        await settle()
        assert fed == ["install", "invalidate"]

    run(scenario)


def test_patience_is_the_fronts_own_deadline_and_a_little_more() -> None:
    async def scenario() -> None:
        fence = send().fence
        requests = {
            "stage": StageRequest(fence, 600.0),
            "pause": PauseRequest(fence, InFlight.DRAIN, 30.0, 60.0),
            "install": FenceRequest(fence),
            "resume": FenceRequest(fence),
        }
        desk = Desk(*(Ack(fence) for _ in requests))
        for verb, request in requests.items():
            desk.outbox.send(Send("one", verb, request))
            await settle()
        patience = {verb: seconds for verb, _, seconds in desk.front.calls}
        assert patience == {"stage": 600 + SLACK_S, "pause": 30 + SLACK_S, "install": 11, "resume": 12}

    run(scenario)
