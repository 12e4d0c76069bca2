"""One round after the other over one fleet: a transaction, one or two bad things in it, what an operator does, rest."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.bad_day.actions import ACTIONS, Scene, kept
from tests.faults.bad_day.catalogue import NAMES
from tests.faults.bad_day.engines import Stand
from tests.faults.bad_day.fleet import RANKS, Fleet, running_fleet
from tests.faults.bad_day.judge import Evidence, FrontView, Next, Verdict, View, judge
from tests.faults.bad_day.left import Leftovers
from tests.faults.bad_day.load import Load
from tests.faults.bad_day.publisher import TRANSPORTS, Answer, Trainer, Trainers
from updater.demo.clients import Expected

#: Each piece between two processes takes so long while the bad thing is awaited, so that a phase can be hit.
LATENCY_S = 0.015
PHASES = ("idle", "planning", "staging", "verifying", "pausing", "installing", "invalidating", "resuming")
_SEEN_S = 3.0  # a phase that does not come within this is not waited for
_REST_S = 60.0  # only a fault reaches it
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Plan:
    """One round as its seed makes it. `moment_s`: after the phase was seen. `gap_s`: between two bad things."""

    seed: int
    what: str
    in_flight: str
    phase: str
    moment_s: float
    actions: tuple[str, ...]
    gap_s: float
    hold_s: float

    @classmethod
    def of(cls, seed: int, names: Sequence[str], longest_s: float) -> Plan:
        """`names`: the actions to choose from. Seeds that follow each other go through them in turn."""
        rng = random.Random(seed)
        actions = [names[seed % len(names)]]
        others = [name for name in names if name != actions[0]]
        if others and rng.random() < 0.35:
            actions.append(rng.choice(others))
        disk = any(ACTIONS[name].disk for name in actions)
        ranks = "cut_ranks" in actions
        what = "disk" if disk else "broadcast" if ranks else rng.choice([*TRANSPORTS, *TRANSPORTS, "rollback"])
        return cls(
            seed,
            what,
            rng.choice(("drain", "abort")),
            rng.choice(PHASES),
            rng.uniform(0.0, 0.06),
            tuple(actions),
            rng.uniform(0.0, 0.3),
            min(longest_s, rng.expovariate(1.0) + 0.2),
        )

    def __str__(self) -> str:
        acts = " + ".join(self.actions)
        return f"seed {self.seed}: {self.what} ({self.in_flight}), {acts} in {self.phase}, for {self.hold_s:.1f} s"


@dataclass
class Report:
    """What came of a round. `operator`: what a person had to do, by verb. `log`: what happened, line by line."""

    plan: Plan
    verdict: Verdict
    outcome: str
    phase: str
    seconds: float
    operator: Counter[str]
    log: tuple[str, ...]

    def __str__(self) -> str:
        faults = "".join(f"\n    FAULT {check}: {fault}" for check, fault in self.verdict.faults)
        helped = f", operator: {dict(self.operator)}" if self.operator else ""
        return f"{self.plan}: {self.outcome or 'not told'} [{self.seconds:.1f} s]{helped}{faults}"


class NoRest(AssertionError):
    """The fleet did not come to rest."""


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
        plan, began = Plan.of(seed, self.names, self.longest_s), time.monotonic()
        log: list[str] = []

        def say(text: str) -> None:
            log.append(f"{time.monotonic() - began:7.3f} {text}")

        self.load.take()
        before = self.view()
        if seed % 2:
            self.fleet.keep_copy()
        scene = Scene(self.fleet, self.trainer, random.Random(seed ^ 0x5EED), self._next_path())
        update, phase = f"round-{seed}-{self.step + 1}", ""
        operator: Counter[str] = Counter()
        answer: Answer | None = None
        fault = ""
        rest = end = before
        nexts: list[Next] = []
        try:
            self.fleet.network.slow(LATENCY_S)
            if plan.phase != "idle":
                self._begin(plan, update, scene.path)
            phase = self._await(plan.phase)
            time.sleep(plan.moment_s)
            for number, name in enumerate(plan.actions):
                time.sleep(plan.gap_s if number else 0.0)
                ACTIONS[name].do(scene)
                say(f"{name} {' '.join(scene.told)} (phase {phase})")
                scene.told.clear()
            if plan.phase == "idle":
                self._begin(plan, update, scene.path)
            time.sleep(plan.hold_s)
            self.fleet.network.slow(0.0)
            scene.mend()
            self.fleet.end_second()
            say("mended")
            self._restart_dead(say, operator)
            answer = self.trainer.answer(_ANSWER_S) if self.trainer.alive else None
            say(f"the trainer was told: {answer.outcome or answer.codes if answer else 'nothing'}")
            if not self.trainer.alive:
                self.trainer = self.trainers.new()
            rest = self._rest(scene, say, operator)
            for transport in self._order(plan):
                nexts.append(self._publish(transport))
                say(f"next over {transport}: {nexts[-1].answer and nexts[-1].answer.outcome}")
                if nexts[-1].answer is None or nexts[-1].answer.outcome != "committed":
                    break
            end = self._settled()
        except AssertionError as error:
            fault = str(error)
        history = self._history()
        verdict = judge(self._evidence(plan, update, answer, history, before, rest, end, nexts, scene))
        if fault:
            verdict = Verdict((("rest", fault), *verdict.faults), verdict.replies, verdict.compared, verdict.checks)
        outcome = answer.outcome if answer and answer.outcome else str(history.get(update, {}).get("outcome", ""))
        return Report(plan, verdict, outcome, phase, time.monotonic() - began, operator, tuple(log))

    def _evidence(
        self,
        plan: Plan,
        update: str,
        answer: Answer | None,
        history: dict[str, Any],
        before: View,
        rest: View,
        end: View,
        nexts: Sequence[Next],
        scene: Scene,
    ) -> Evidence:
        for receipt in history.values():
            if receipt["outcome"] == "committed" and receipt["kind"] == "update":
                self._learn(receipt["version"], min(receipt["observed"].values()))
        if scene.forgotten:  # it may have been published by a coordinator that nobody can ask any more
            offered = f"0-{self.step - len(nexts)}"
            digest = self.digests.get(self.labels.get(offered, -1), "")
            self.published.setdefault(offered, digest)
        acts = [ACTIONS[name] for name in plan.actions]
        return Evidence(
            expected=self._expected(),
            published=dict(self.published),
            heard=self.load.take(),
            margin=self.stand.margin,
            max_tokens=self.stand.max_tokens,
            allowed=frozenset[str]().union(*(act.gives for act in acts)),
            update=update,
            answer=answer,
            history=history,
            before=before,
            rest=rest,
            end=end,
            next=nexts,
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
        policy = {"in_flight": plan.in_flight, "quiesce_s": 2.0, "pause_lease_s": 2.0, "deadline_s": 10.0}
        self._send(plan.what, update, path, policy, lease_s=2.0, pace_s=0.01)

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

    def _restart_dead(self, say: Callable[[str], None], operator: Counter[str]) -> None:
        """docs/operations.md: what died is started again, the coordinator with the same state folder."""
        fleet = self.fleet
        if fleet.coordinator is None or not fleet.coordinator.alive:
            fleet.start_coordinator()
            operator["start coordinator"] += 1
            say("the coordinator was started again")
        for name, life in fleet.fronts.items():
            if not life.alive:
                fleet.start_front(name)
                operator["start replica"] += 1
                say(f"{name} was started again")

    def _rest(self, scene: Scene, say: Callable[[str], None], operator: Counter[str]) -> View:
        """Nothing runs, and every replica is open, or joining with nobody to catch up from but the next update."""
        end, told, seen = time.monotonic() + _REST_S, dict[str, str](), ""
        while True:
            self._restart_dead(say, operator)
            self._lead_again(say, operator)
            view = self.view()
            states = {front.replica: front.state for front in view.fronts}
            seen = f"{self._phase()}, {states}, seen as {[front.seen_as for front in view.fronts]}"
            if self._phase() == "idle" and all(self._at_rest(front, view) for front in view.fronts):
                say(f"at rest: {seen}")
                return view
            for name, state in states.items():
                if state == "quarantined" and told.get(name) != state:
                    url = f"{self.fleet.url(name)}{self.stand.below}/replica/v1/readmit"
                    httpx.post(url, json={}, timeout=30.0, trust_env=False)
                    operator["readmit"] += 1
                    say(f"{name} was readmitted")
                elif state == "broken" and told.get(name) != state:
                    scene.touched.add(name)
                    self.fleet.fronts[name].kill(15)
                    say(f"{name} is broken, and was ended")
                told[name] = state
            if time.monotonic() > end:
                raise NoRest(f"no rest within {_REST_S:g} s: {seen}")
            time.sleep(0.05)

    def _lead_again(self, say: Callable[[str], None], operator: Counter[str]) -> None:
        """docs/operations.md: a coordinator whose journal is not that of its fleet adopts it; what an update left shut
        is released before."""
        if self.fleet.not_ready() not in ("adopt_needed", "behind"):
            return
        if self.fleet.adopt(self.fleet.port):
            operator["adopt"] += 1
            say("adopted")
            return
        shut = {name: self.fleet.status(name) or {} for name in RANKS}
        installed = [name for name, status in shut.items() if status.get("state") in ("installed", "invalidated")]
        to = "live" if len(installed) == len(RANKS) else "previous"
        for name in installed:
            url = f"{self.fleet.url(name)}{self.stand.below}/replica/v1/release"
            answer = httpx.post(url, json={"to": to}, timeout=30.0, trust_env=False)
            if answer.status_code == 200:
                operator["release"] += 1
                say(f"{name} was released to {to}")

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


@contextmanager
def running_driver(home: Path, stand: Stand, names: Sequence[str] = NAMES, longest_s: float = 4.0) -> Iterator[Driver]:
    """Ends everything that it started."""
    for checkpoint in stand.checkpoints:
        shutil.copytree(checkpoint, kept(checkpoint))
    with running_fleet(home, stand) as fleet:
        trainers = Trainers(fleet)
        asking = {**stand.asking, "max_tokens": stand.max_tokens}
        load = Load({name: fleet.url(name) for name in RANKS}, stand.prompts, asking)
        try:
            driver = Driver(fleet, stand, trainers, load, Leftovers(fleet), tuple(names), longest_s)
            load.start()
            yield driver
        finally:
            fleet.go_on()
            trainers.close()
            if load._thread.ident is not None:
                load.stop()
