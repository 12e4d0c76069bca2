"""Simulated fronts for tests of whatever speaks the participant contract: the real replica machine, no ranks.

The bytes of a version are the text of the file that its offer names; its content digest is the SHA-256 of that. What
may go wrong is told beforehand: work that fails, work that is held, calls and answers that are lost, death.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response

from updater.coordinator.clock import Clock, Timer
from updater.coordinator.members.participants import PREFIX, Participant, Refusal, Unreachable
from updater.core.errors import Failure, Rejected
from updater.core.participant import (
    MESSAGES,
    Description,
    Fence,
    FrontState,
    PauseReply,
    PlanReply,
    PlanRequest,
    Progress,
    RankInfo,
    StageReply,
    VerifyReply,
)
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode
from updater.core.replica.machine import ReplicaState, started, status, step
from updater.core.replica.state import (
    Answer,
    Asked,
    ClearLease,
    Done,
    Failed,
    LeaseTimer,
    OpenAdmission,
    RankDied,
    Refuse,
    ReplicaEvent,
    SetLease,
    Work,
)
from updater.protocol import wire
from updater.server import guard
from updater.server.security import FrontKeys, Tokens
from updater.testing.values import source_of

CAPABILITIES = Capabilities(
    cells=((InFlight.DRAIN, CachePolicy.RESET), (InFlight.ABORT, CachePolicy.RESET)), install=(InstallMode.FLIP,)
)


def digest_of(content: str) -> str:
    """The content digest of a simulated version."""
    return hashlib.sha256(content.encode()).hexdigest()


class SimulatedFront:
    """A `Participant`. Several coordinators may hold the same one, as they would reach the same process.

    `fail[verb]`: failures of the next works of that verb; `hold[verb]`: works of it wait until the event is set.
    `lose_call`, `lose_answer`: verbs whose next calls do not arrive, or whose next answers do not.
    `deaf`: nothing arrives at all. `calls`: every (verb, request) that arrived.
    """

    def __init__(self, replica: str, clock: Clock, start: str = "start", url: str = "") -> None:
        self.replica, self._clock, self._start = replica, clock, start
        self._url = url or f"http://{replica}.test"
        self.fail: dict[str, deque[Failure]] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.dtypes: tuple[tuple[str, str], ...] = (("layers.#.w", "BF16"), ("packed", ""))
        self.lose_call: deque[str] = deque()
        self.lose_answer: deque[str] = deque()
        self.deaf = False
        self.calls: list[tuple[str, Any]] = []
        self.opened: list[str] = []  # every version that admission opened on
        self._timer: Timer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.ranks: tuple[int, ...] = (0,)  # the numbers that it says its ranks have
        self.config_hash = ""
        self.document = ""  # as JSON: what its engine runs on, beside tensors
        self.progress: Progress | None = None  # what it says of its staging
        self.cannot_start: Failure | None = None  # then it has no front: its server refuses every verb with this
        self.restart()

    def restart(self) -> None:
        """Another process in its place: all memory is gone, and it waits, shut, on its start checkpoint."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting: dict[tuple[str, Fence], list[asyncio.Future[Any]]] = {}
        self.state: ReplicaState = started(self.replica, secrets.token_hex(4), "start", digest_of(self._start), ranks=1)

    @property
    def url(self) -> str:
        return self._url

    @property
    def serving(self) -> str | None:
        """The version that requests meet now, or None while it is shut."""
        return self.state.live.version if self.state.state is FrontState.OPEN else None

    def asked(self, verb: str) -> int:
        """How often a verb arrived."""
        return sum(1 for name, _ in self.calls if name == verb)

    def die(self, failure: Failure) -> None:
        """A rank process is gone."""
        self._feed(RankDied(failure))

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        if self.deaf:
            raise Unreachable("no front listens", refused=True)
        if verb in self.lose_call:
            self.lose_call.remove(verb)
            raise Unreachable(f"{verb} did not arrive")
        self.calls.append((verb, request))
        answer = await self._answer(verb, request, timeout_s)
        if self.deaf or verb in self.lose_answer:
            if verb in self.lose_answer:
                self.lose_answer.remove(verb)
            raise Unreachable(f"the answer to {verb} did not arrive")
        return answer

    async def close(self) -> None:
        """The connection ends, not the front."""

    async def _answer(self, verb: str, request: Any, timeout_s: float) -> Any:
        if self.cannot_start is not None:
            raise Refusal((self.cannot_start,))
        if verb == "status":
            return replace(status(self.state, self._clock.now()), progress=self.progress)
        if verb == "describe":
            return self._description()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((verb, request.fence), []).append(future)
        self._feed(Asked(verb, request))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise Unreachable(f"no answer to {verb} within {timeout_s} s") from None

    def _description(self) -> Description:
        return Description(
            status=status(self.state, self._clock.now()),
            engine="simulated",
            url=self._url,
            capabilities=CAPABILITIES,
            config_hash=self.config_hash,
            document=self.document,
            model="/models/simulated",
            ranks=tuple(RankInfo(number, 1, 2, 1000) for number in self.ranks),
            dtypes=self.dtypes,
        )

    # -- the replica machine's shell

    def _feed(self, event: ReplicaEvent) -> None:
        self.state, effects = step(self.state, event, self._clock.now())
        for effect in effects:
            match effect:
                case Answer(verb, fence, reply):
                    self._resolve(verb, fence, reply)
                case Refuse(verb, fence, failures):
                    self._resolve(verb, fence, Refusal(failures))
                case Work():
                    self._start_work(effect)
                case SetLease(at):
                    self._set_lease(at)
                case ClearLease():
                    self._clear_lease()
                case OpenAdmission(version, _):
                    self.opened.append(version)
                case _:
                    pass

    def _resolve(self, verb: str, fence: Fence, answer: Any) -> None:
        for future in self._waiting.pop((verb, fence), []):
            if future.done():
                continue
            if isinstance(answer, Refusal):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _set_lease(self, at: float) -> None:
        self._clear_lease()
        self._timer = self._clock.call_later(at - self._clock.now(), lambda: self._feed(LeaseTimer()))

    def _clear_lease(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_work(self, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(self._work(work, self.state.incarnation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, work: Work, incarnation: str) -> None:
        held = self.hold.get(work.verb)
        if held is not None:
            await held.wait()
        if self.state.incarnation != incarnation:
            return
        fence, planned = work.request.fence, self.fail.get(work.verb)
        if planned:
            self._feed(Failed(work.verb, fence, (planned.popleft(),)))
            return
        plan = work.request if isinstance(work.request, PlanRequest) else work.plan
        try:
            reply = _reply(work.verb, fence, plan)
        except OSError as error:
            failure = Failure("source_missing", type(error).__name__, file=source_of(plan.offer) if plan else "")
            self._feed(Failed(work.verb, fence, (failure,)))
            return
        self._feed(Done(work.verb, fence, reply, 0.001))


def _reply(verb: str, fence: Fence, plan: PlanRequest | None) -> Any:
    """What ranks would report."""
    content = Path(source_of(plan.offer)).read_text() if plan is not None and plan.offer is not None else ""
    observed = digest_of(content) if content else plan.digest if plan is not None else ""
    manifest = hashlib.sha256(plan.manifest.encode()).hexdigest() if plan is not None and plan.manifest else ""
    replies: dict[str, Any] = {
        "plan": PlanReply(fence, manifest, 2, len(content), InstallMode.FLIP),
        "stage": StageReply(fence, len(content), 0.001),
        "verify": VerifyReply(fence, observed, "digests" if manifest else "structure_only", 2),
        "pause": PauseReply(fence, plan.fence.serial if plan is not None else 0, "", 7, False),
    }
    return replies.get(verb)


class SimulatedFleet:
    """Simulated fronts by URL, and the factory that a coordinator reaches them through."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fronts: dict[str, SimulatedFront] = {}

    def add(self, replica: str, start: str = "start", url: str = "") -> SimulatedFront:
        front = SimulatedFront(replica, self._clock, start, url)
        self._fronts[front.url] = front
        return front

    def make(self, replica: str, url: str) -> Participant:
        """A `ParticipantFactory`."""
        urlsplit(url).port  # noqa: B018  (raises ValueError for what is no port)
        front = self._fronts.get(url.rstrip("/"))
        return front if front is not None else _Nobody(url)


class _Nobody:
    def __init__(self, url: str) -> None:
        self.url = url

    async def call(self, verb: str, request: Any, timeout_s: float) -> Any:
        raise Unreachable("no front listens", refused=True)

    async def close(self) -> None:
        pass


def front_app(front: SimulatedFront, tokens: Tokens | None = None, keys: FrontKeys | None = None) -> FastAPI:
    """The participant contract over HTTP, as a real front offers it."""
    app = FastAPI()

    async def participant(verb: str, request: Request) -> Response:
        if verb not in MESSAGES:
            raise Rejected(Failure("not_found", f"no verb {verb!r}"))
        try:
            asked: Any = wire.decode(MESSAGES[verb][0], await request.body() or b"{}")
        except wire.WireError as error:
            raise Rejected(Failure("bad_request", str(error))) from None
        try:
            return Response(wire.encode(await front.call(verb, asked, 3600.0)), media_type="application/json")
        except Refusal as refusal:
            raise Rejected(*refusal.failures) from None
        except Unreachable:
            return Response(status_code=502)

    app.add_api_route(f"{PREFIX}/{{verb}}", participant, methods=["POST"], response_model=None)
    guard.install(app, tokens=tokens or Tokens(), max_body=64 << 20, keys=keys)
    return app


class ManualClock:
    """Time that passes only when told to. `advance` runs what falls due, in order."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._due: list[_Due] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    def call_later(self, seconds: float, call: Any) -> Timer:
        due = _Due(self._now + seconds, call)
        self._due.append(due)
        return due

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        timer = self.call_later(seconds, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()

    async def advance(self, seconds: float) -> None:
        """Let time pass; between two timers everything that can run runs."""
        end = self._now + seconds
        await settle()
        while True:
            due = min((each for each in self._due if not each.cancelled), key=lambda each: each.at, default=None)
            if due is None or due.at > end:
                break
            self._due = [each for each in self._due if each is not due and not each.cancelled]
            self._now = max(self._now, due.at)
            due.call()
            await settle()
        self._now = end
        await settle()


class _Due:
    def __init__(self, at: float, call: Any) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


async def settle(turns: int = 50) -> None:
    """Let tasks run until the loop has turned often enough for every chain of simulated messages."""
    for _ in range(turns):
        await asyncio.sleep(0)
