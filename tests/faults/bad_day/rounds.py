"""One round after the other over one fleet: a transaction, one or two bad things in it, what an operator does, rest."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.faults.bad_day.actions import ACTIONS, Scene, kept
from tests.faults.bad_day.catalogue import NAMES
from tests.faults.bad_day.course import Course, NoRest, Plan, Report
from tests.faults.bad_day.engines import Stand
from tests.faults.bad_day.fleet import RANKS, Fleet, running_fleet
from tests.faults.bad_day.judge import Evidence, FrontView, Next, View, judge
from tests.faults.bad_day.left import Leftovers
from tests.faults.bad_day.load import Load
from tests.faults.bad_day.publisher import TRANSPORTS, Trainer, Trainers
from updater.demo.clients import Expected

#: Each piece between two processes takes so long while the bad thing is awaited, so that a phase can be hit.
LATENCY_S = 0.015
_SEEN_S = 3.0  # a phase that does not come within this is not waited for
_REST_S = 60.0  # only a fault reaches it
_ANSWER_S = 75.0  # a trainer gives up after 60
_FIRST_REPLY_S = 240.0


@dataclass(eq=False)
class Driver:
    """`labels`: version -> number of its checkpoint, of everything that was ever offered."""

    fleet: Fleet
    stand: Stand
    trainers: Trainers
    load: Load
    left: Leftovers
    names: tuple[str, ...]
    longest_s: float = 4.0
    trainer: Trainer = field(init=False)
    labels: dict[str, int] = field(default_factory=lambda: {"start": 0})
    published: dict[str, str] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        self.trainer = self.trainers.new()
        self._learn("start", self.view().digest)
        for transport in (TRANSPORTS * len(self.stand.checkpoints))[: len(self.stand.checkpoints)]:
            self._publish(transport)  # all are known from now on, and every process has done all it ever does

    # ----- one round

    def play(self, seed: int) -> Report:
        plan = Plan.of(seed, self.names, self.longest_s)
        self.load.take()
        if seed % 2:
            self.fleet.keep_copy()
        scene = Scene(self.fleet, self.trainer, random.Random(seed ^ 0x5EED), self._next_path())
        course = Course(plan, f"round-{seed}-{self.step + 1}", self.view())
        fault = ""
        try:
            self._go_wrong(course, scene)
            self._mend(course, scene)
            course.rest = self._rest(course, scene)
            self._go_on(course)
            course.end = self._settled()
        except Exception as error:  # a round that breaks is a finding, and the next one begins on a whole fleet
            fault = f"{type(error).__name__}: {error}"
            course.say(fault)
            with contextlib.suppress(AssertionError):
                self._recover(course, scene)
        history = self._history()
        verdict = judge(self._evidence(course, scene, history))
        if fault:
            verdict = replace(verdict, faults=(("rest", fault), *verdict.faults))
        return course.report(verdict, history)

    def _go_wrong(self, course: Course, scene: Scene) -> None:
        """A transaction, and in the middle of it what the plan says."""
        plan = course.plan
        self.fleet.network.slow(LATENCY_S)
        if plan.phase != "idle":
            self._begin(plan, course.update, scene.path)
        course.phase = self._await(plan.phase)
        time.sleep(plan.moment_s)
        for number, name in enumerate(plan.actions):
            time.sleep(plan.gap_s if number else 0.0)
            ACTIONS[name].do(scene)
            course.say(f"{name} {' '.join(scene.told)} (phase {course.phase})")
            scene.told.clear()
        if plan.phase == "idle":
            self._begin(plan, course.update, scene.path)
        time.sleep(plan.hold_s)
        self.fleet.network.slow(0.0)

    def _mend(self, course: Course, scene: Scene) -> None:
        """What lasted ends, and what died is started again; then the trainer hears how its transaction ended."""
        scene.mend()
        self.fleet.end_seconds()
        course.say("mended")
        self._restart_dead(course)
        self._hear(course)
        if not self.trainer.alive:
            self.trainer = self.trainers.new()

    def _hear(self, course: Course) -> None:
        """What the trainer is told, if it lives. What dies late is started again meanwhile. Raises NoRest."""
        end = time.monotonic() + _ANSWER_S
        while self.trainer.alive and course.answer is None:
            self._restart_dead(course)
            course.answer = self.trainer.answer(0.2)
            if course.answer is None and time.monotonic() > end:
                raise NoRest(f"the trainer was told nothing within {_ANSWER_S:g} s")
        told = course.answer
        course.say(f"the trainer was told: {told.outcome or told.codes if told is not None else 'nothing'}")

    def _go_on(self, course: Course) -> None:
        """The next update over each transport. One that fails is the last."""
        for transport in self._order(course.plan):
            course.next.append(self._publish(transport))
            answer = course.next[-1].answer
            course.say(f"next over {transport}: {answer.outcome or answer.codes if answer is not None else 'nothing'}")
            if answer is None or answer.outcome != "committed":
                return

    def _recover(self, course: Course, scene: Scene) -> None:
        scene.mend()
        self.fleet.end_seconds()
        self._restart_dead(course)
        self.trainer.kill()
        self.trainer = self.trainers.new()

    def _evidence(self, course: Course, scene: Scene, history: dict[str, Any]) -> Evidence:
        for receipt in history.values():
            if receipt["outcome"] == "committed" and receipt["kind"] == "update":
                self._learn(receipt["version"], min(receipt["observed"].values()))
        if scene.forgotten:  # it may have been published by a coordinator that cannot be asked any more
            offered = f"0-{self.step - len(course.next)}"
            self.published.setdefault(offered, self.digests.get(self.labels.get(offered, -1), ""))
        acts = [ACTIONS[name] for name in course.plan.actions]
        return Evidence(
            expected=self._expected(),
            published=dict(self.published),
            heard=self.load.take(),
            margin=self.stand.margin,
            max_tokens=self.stand.max_tokens,
            allowed=frozenset[str]().union(*(act.gives for act in acts)),
            update=course.update,
            answer=course.answer,
            history=history,
            before=course.before,
            rest=course.rest,
            end=course.end,
            next=course.next,
            left=self.left.look(self.trainer.pid),
            touched=frozenset(scene.touched),
            only_coordinator=all(act.of_coordinator for act in acts),
            forgotten=scene.forgotten,
        )

    def _learn(self, version: str, digest: str) -> None:
        """What was published. Equal bytes have equal digests, under whatever version."""
        self.published[version] = digest
        self.digests[self.labels[version]] = digest

    # ----- what a trainer does

    def _next_path(self) -> Path:
        return self.stand.checkpoints[(self.step + 1) % len(self.stand.checkpoints)]

    def _begin(self, plan: Plan, update: str, path: Path) -> None:
        slower = self.stand.slower
        times = {"quiesce_s": 2.0 * slower, "pause_lease_s": 2.0 * slower, "deadline_s": 10.0 * slower}
        policy = {"in_flight": plan.in_flight, **times}
        self._send(plan.what, update, path, policy, lease_s=2.0 * slower, pace_s=0.01)

    def _publish(self, transport: str) -> Next:
        """With nothing in its way, and with time enough for a busy machine."""
        path = self._next_path()
        self._send(transport, f"next-{self.step + 1}-{transport}", path, {"in_flight": "abort"}, lease_s=None)
        answer = self.trainer.answer(_ANSWER_S)
        if answer is not None and answer.receipt is not None and answer.outcome == "committed":
            self._learn(f"0-{self.step}", min(answer.receipt["observed"].values()))
        return Next(transport, f"0-{self.step}", answer)

    def _send(
        self, what: str, update: str, path: Path, policy: dict[str, Any], *, lease_s: float | None, pace_s: float = 0.0
    ) -> None:
        self.step += 1
        version = f"0-{self.step}"
        self.labels[version] = self.stand.checkpoints.index(path)
        lease_s = None if what == "disk" else lease_s
        command = {
            "transport": what,
            "id": update,
            "path": str(path),
            "version": version,
            "policy": policy,
            "lease_s": lease_s,
            "pace_s": pace_s,
        }
        self.trainer.begin(command)

    def _order(self, plan: Plan) -> tuple[str, ...]:
        turn = plan.seed % len(TRANSPORTS)
        return (*TRANSPORTS[turn:], *TRANSPORTS[:turn])

    # ----- what an operator does

    def _restart_dead(self, course: Course) -> None:
        """docs/operations.md: what died is started again, the coordinator with the same state folder."""
        fleet = self.fleet
        if fleet.coordinator is None or not fleet.coordinator.alive:
            fleet.start_coordinator()
            course.did("start coordinator", "")
        for name, life in fleet.fronts.items():
            if not life.alive:
                fleet.start_front(name)
                course.did("start replica", name)

    def _rest(self, course: Course, scene: Scene) -> View:
        """Nothing runs, and every replica is open, or joining with nothing to catch up from but the next update."""
        end, told, seen = time.monotonic() + _REST_S, dict[str, str](), ""
        while time.monotonic() < end:
            self._restart_dead(course)
            self._lead_again(course)
            view = self.view()
            seen = f"{self._phase()}, " + ", ".join(f"{f.replica} {f.state} ({f.seen_as})" for f in view.fronts)
            if self._phase() == "idle" and all(self._at_rest(front, view) for front in view.fronts):
                course.say(f"at rest: {seen}")
                return view
            for front in view.fronts:
                if told.get(front.replica) != front.state:
                    self._cure(front, course, scene)
                told[front.replica] = front.state
            time.sleep(0.05)
        raise NoRest(f"no rest within {_REST_S:g} s: {seen}")

    def _cure(self, front: FrontView, course: Course, scene: Scene) -> None:
        """docs/operations.md: each state that does not end by itself has a cure."""
        if front.state == "quarantined":
            self._tell(front.replica, "readmit", {})
            course.did("readmit", front.replica)
        elif front.state == "broken":
            scene.touched.add(front.replica)
            self.fleet.fronts[front.replica].kill(signal.SIGTERM)
            course.say(f"{front.replica} is broken, and was ended")

    def _lead_again(self, course: Course) -> None:
        """docs/operations.md: a coordinator whose journal is not that of its fleet adopts it; what an update left shut
        is released before."""
        if self.fleet.not_ready() not in ("adopt_needed", "behind"):
            return
        if self.fleet.adopt(self.fleet.port):
            course.did("adopt", "")
            return
        statuses = {name: self.fleet.status(name) or {} for name in RANKS}
        installed = [name for name, status in statuses.items() if status.get("state") in ("installed", "invalidated")]
        to = "live" if len(installed) == len(RANKS) else "previous"
        for name in installed:
            if self._tell(name, "release", {"to": to}):
                course.did(f"release to {to}", name)

    def _tell(self, name: str, verb: str, body: Mapping[str, str]) -> bool:
        """An operator's word to one replica."""
        url = f"{self.fleet.url(name)}{self.stand.below}/replica/v1/{verb}"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.post(url, json=dict(body), timeout=30.0, trust_env=False).status_code == 200
        return False

    def _at_rest(self, front: FrontView, view: View) -> bool:
        if front.state == "open":
            return front.seen_as == "open"
        streamed = view.version != "start" and self._transport(view.version) != "disk"
        return front.state == "joining" and front.seen_as == "joining" and streamed

    def _transport(self, version: str) -> str:
        for receipt in self._history().values():
            if receipt["version"] == version and receipt["kind"] == "update":
                return str(receipt["id"]).rpartition("-")[2]
        return ""

    def _settled(self) -> View:
        """After the last update, which all replicas took part in."""
        end = time.monotonic() + _REST_S
        while True:
            view = self.view()
            if all(front.state == front.seen_as == "open" for front in view.fronts) or time.monotonic() > end:
                return view
            time.sleep(0.05)

    # ----- looking

    def _await(self, phase: str) -> str:
        """The phase that was seen: the wanted one, or what there was when it had not come in time."""
        end = time.monotonic() + (_SEEN_S if phase != "idle" else 0.0)
        while True:
            seen = self._phase()
            if seen == phase or time.monotonic() > end:
                return seen
            time.sleep(0.003)

    def _phase(self) -> str:
        fleet = self.fleet.get("/v1/fleet")
        return str(fleet["phase"]) if fleet is not None else "silent"

    def view(self) -> View:
        version, fleet = self.fleet.get("/v1/version") or {}, self.fleet.get("/v1/fleet") or {"members": []}
        seen = {member["replica"]: member["state"] for member in fleet["members"]}
        fronts = []
        for name in RANKS:
            status = self.fleet.status(name) or {}
            told = (str(status.get(key) or "") for key in ("state", "live_version", "live_digest", "incarnation"))
            fronts.append(FrontView(name, *told, seen_as=seen.get(name, "")))
        return View(version.get("version") or "", version.get("digest") or "", tuple(fronts))

    def _history(self) -> dict[str, Any]:
        told = self.fleet.get("/v1/history?limit=1000")
        return {receipt["id"]: receipt for receipt in told["receipts"]} if told is not None else {}

    def _expected(self) -> dict[str, Sequence[Expected]]:
        return {label: self.stand.expected[number] for label, number in self.labels.items()}


def _first_replies(fleet: Fleet, stand: Stand, asking: Mapping[str, Any]) -> None:
    """Every replica serves once before anything is timed: a vLLM of two ranks compiles a kernel in its first step, and
    on a busy machine its workers do nothing else for most of a minute.
    """
    for name in RANKS:
        for prompt in stand.prompts:
            body = {**asking, "prompt": list(prompt)}
            reply = httpx.post(f"{fleet.url(name)}/v1/completions", json=body, timeout=_FIRST_REPLY_S, trust_env=False)
            reply.raise_for_status()


@contextmanager
def running_driver(home: Path, stand: Stand, names: Sequence[str] = NAMES, longest_s: float = 4.0) -> Iterator[Driver]:
    """Ends everything that it started."""
    for checkpoint in stand.checkpoints:
        shutil.copytree(checkpoint, kept(checkpoint))
    with running_fleet(home, stand) as fleet:
        trainers = Trainers(fleet)
        asking = {**stand.asking, "max_tokens": stand.max_tokens}
        load = Load({name: fleet.url(name) for name in RANKS}, stand.prompts, asking, stand.clients)
        try:
            _first_replies(fleet, stand, asking)
            driver = Driver(fleet, stand, trainers, load, Leftovers(fleet), tuple(names), longest_s)
            load.start()
            yield driver
        finally:
            fleet.go_on()
            trainers.close()
            if load._thread.ident is not None:
                load.stop()
