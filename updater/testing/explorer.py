"""A seeded walk through histories of a simulated fleet. Same seed and rates, same history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from updater.core.fleet.events import AbortRequested, CommitRequested, LeaseExpired, Seal
from updater.core.participant import FrontState
from updater.core.policy import CachePolicy, CommitMode, InFlight, OnBusy, Policy
from updater.core.version import Version
from updater.testing.simulation import Simulation
from updater.testing.values import Action, Disk, Machines, SimulatedSource, Violation

FAULTS = ("plan", "stage", "verify", "pause", "install", "invalidate", "restore", "resume", "discard", "join")


@dataclass(frozen=True, slots=True)
class Rates:
    """Chances per step, in thousandths, of what is not natural."""

    drop: int = 20
    repeat: int = 20
    timer: int = 10
    late_lease: int = 5
    fault: int = 5
    lost: int = 5
    poll: int = 15
    death: int = 3
    crash: int = 4
    crash_in: int = 4
    client: int = 60
    tokens: int = 80
    audit: int = 4
    spare: int = 3
    call: int = 15
    freeze: int = 3
    journal: int = 2
    older: int = 3

    def scaled(self, factor: float) -> Rates:
        """More or less trouble; clients and tokens stay as they are."""
        keep = ("client", "tokens")
        values = {name: getattr(self, name) for name in self.__slots__}
        return Rates(**{name: rate if name in keep else round(rate * factor) for name, rate in values.items()})


class Explorer:
    """One history: `run(steps)` raises Violation if it breaks a promise, on the way or at its end."""

    def __init__(
        self, seed: int, rates: Rates | None = None, *, machines: Machines | None = None, replicas: int = 2
    ) -> None:
        self.random, self.rates = Random(seed), rates or Rates()
        self.sim = Simulation(machines=machines)
        self.updates = 0
        self.older: Disk | None = None
        for number in range(replicas):
            self.sim.start_replica("abc"[number])

    def run(self, steps: int) -> Simulation:
        self.sim.check()
        for _ in range(steps):
            self._step()
        self.sim.heal()
        self.sim.check_settled()
        self._ends_well()
        return self.sim

    def _ends_well(self) -> None:
        """A fleet that was healed takes an update, and every replica that can serve serves it."""
        self.updates += 1
        self._begin(Policy(), manifest="")
        self.sim.heal()
        self.sim.check_settled()

    def _step(self) -> None:
        sim, rates = self.sim, self.rates
        draw = self.random.randrange(1000)
        for name, act in self._unnatural().items():
            rate: int = getattr(rates, name)
            if draw < rate:
                act()
                sim.check()
                return
            draw -= rate
        if sim.state is None:
            self._restart()
            return
        natural = sim.actions()
        if natural:
            sim.perform(self.random.choice(natural))
        elif sim.retries() and self.random.random() < 0.7:
            sim.perform(self.random.choice(sim.retries()))
        elif sim.timers() and self.random.random() < 0.3:
            sim.perform(self.random.choice(sim.timers()))
        else:
            self._client()

    def _unnatural(self) -> dict[str, Callable[[], None]]:
        return {
            "drop": lambda: self._packet("drop"),
            "repeat": lambda: self._packet("repeat"),
            "timer": self._timer,
            "late_lease": self._late_lease,
            "fault": lambda: self._one("fault", self.random.choice(FAULTS), "rank_failed", self.random.randrange(2)),
            "lost": lambda: self._one("lost"),
            "poll": lambda: self._one("poll"),
            "death": self._death,
            "crash": self._crash,
            "crash_in": lambda: self.sim.do_crash_in(self.random.randrange(12)),
            "client": self._client,
            "tokens": lambda: self._one("generate"),
            "audit": lambda: self._one("audit_fails", self.random.random() < 0.5),
            "spare": lambda: self._one("spare_lost"),
            "call": self._call,
            "freeze": self._false_death,
            "journal": lambda: self._lose_journal(None),
            "older": self._older_journal,
        }

    def _name(self) -> str:
        return self.random.choice(sorted(self.sim.replicas))

    def _one(self, kind: str, *args: object) -> None:
        self.sim.perform(Action(kind, (self._name(), *args)))

    def _packet(self, kind: str) -> None:
        if self.sim.wire:
            self.sim.perform(Action(kind, (self.random.choice(self.sim.wire).number,)))

    def _timer(self) -> None:
        timers = self.sim.timers()
        if timers:
            self.sim.perform(self.random.choice(timers))

    def _late_lease(self) -> None:
        leases = [action for action in self.sim.timers() if action.kind == "lease"]
        if leases:
            self.sim.perform(Action("pass_lease", self.random.choice(leases).args))

    def _death(self) -> None:
        name = self._name()
        if not self.sim.replicas[name].alive:
            self.sim.perform(Action("reborn", (name,)))
        else:
            self.sim.perform(Action(self.random.choice(("die", "rank_dies")), (name,)))

    def _crash(self) -> None:
        if self.sim.state is not None:
            self.sim.perform(Action("crash"))

    # --- whom a front obeys

    def _call(self) -> None:
        """A front asks whether it is a member; an orphan that heard it twice joins again."""
        name = self._name()
        if self.sim.replicas[name].state.state is FrontState.ORPHANED and self.random.random() < 0.5:
            self.sim.perform(Action("rejoin", (name,)))
        else:
            self.sim.perform(Action("call", (name,)))

    def _false_death(self) -> None:
        """An operator removes a member that only stood still: it wakes up, and serves until it hears that."""
        name, state = self._name(), self.sim.state
        member = state.member(name) if state is not None else None
        if member is not None and self.sim.replicas[name].alive:
            self.sim.perform(Action("lost", (name,)))
            self.sim.perform(Action("remove", (name,)))

    def _older_journal(self) -> None:
        """A copy is kept now, or the one of before takes the journal's place."""
        if self.older is None:
            self.older = self.sim.disk.copy()
        else:
            older, self.older = self.older, None
            self._lose_journal(older)

    def _lose_journal(self, older: Disk | None) -> None:
        """Of a fleet at rest. It shuts no replica (I11); then an operator does what the coordinator says."""
        sim = self.sim
        if sim.state is None:
            self._restart()
        sim.settle()
        if older is None:
            self.older = None  # from here on it would be another fleet's
        sim.lose_journal(older)
        open_before = sim.open_labels()
        sim.do_restart(self._silent())
        for _ in range(2):
            for name in sorted(sim.replicas):
                sim.perform(Action("call", (name,)))
        sim.settle()
        open_after = sim.open_labels()
        shut = [name for name, label in open_before.items() if open_after.get(name) != label]
        if len(set(open_before.values())) == 1 and shut:
            raise Violation("I11", f"{shut} were shut by the loss of a journal")
        sim.perform(Action("hold_ends"))
        if sim.state is not None and sim.state.hold is not None:
            sim.perform(Action("adopt_all"))
        sim.settle()

    def _restart(self) -> None:
        self.sim.listens = self.random.random() < 0.3
        self.sim.perform(Action("restart", (self._silent(),)))

    def _silent(self) -> tuple[str, ...]:
        return tuple(name for name in self.sim.replicas if self.random.random() < 0.2)

    # --- clients and operators

    def _client(self) -> None:
        if self.sim.state is None:
            return
        choice = self.random.randrange(12)
        last = f"u{self.updates}"
        if choice < 4:
            self.updates += 1
            self._begin(self._policy(), manifest=self.random.choice(("", "", "good", "bad")))
        elif choice < 6:
            self._join()
        elif choice == 6:
            self.updates += 1
            self.sim.rollback(f"u{self.updates}", policy=Policy(on_busy=self.random.choice(tuple(OnBusy))))
        elif choice == 7:
            self.sim.ask(CommitRequested(last))
        elif choice == 8:
            self.sim.ask(AbortRequested(last))
        elif choice == 9:
            self.sim.feed(LeaseExpired(last))
        elif choice == 10 or (choice == 11 and self.random.random() < 0.5):
            self.sim.ask(Seal(last))
        else:
            self._operator()

    def _policy(self) -> Policy:
        return Policy(
            in_flight=self.random.choice((InFlight.DRAIN, InFlight.ABORT)),
            cache=self.random.choice((CachePolicy.RESET, CachePolicy.NAMESPACE)),
            commit=self.random.choice((CommitMode.AUTO, CommitMode.AUTO, CommitMode.MANUAL)),
            on_busy=self.random.choice(tuple(OnBusy)),
            new_run=self.random.random() < 0.1,
        )

    def _begin(self, policy: Policy, manifest: str) -> None:
        """Mostly the next step; sometimes a stale one, or one that was rolled back."""
        highest = self.sim.state.highest if self.sim.state else Version(0, 0)
        step = max(0, highest.step + self.random.choice((1, 1, 1, 2, 0, -1)))
        content = f"bytes-{self.updates}"
        promised = {"": "", "good": content, "bad": "other"}[manifest]
        stream = bool(promised) and self.random.random() < 0.5
        self.sim.begin(f"u{self.updates}", step, content=content, manifest=promised, stream=stream, policy=policy)

    def _join(self) -> None:
        name = self._name()
        process = self.sim.replicas[name]
        if not process.alive:
            self.sim.perform(Action("reborn", (name,)))
        elif process.state.state is FrontState.JOINING:
            self.sim.perform(Action("join", (name,)))

    def _operator(self) -> None:
        """Removes a dead process, restarts a broken one, readmits a quarantined one, or loses a source."""
        name = self._name()
        process = self.sim.replicas[name]
        if not process.alive:
            self.sim.perform(Action("remove", (name,)))
        elif process.state.state is FrontState.QUARANTINED and self.random.random() < 0.7:
            self.sim.perform(Action("readmit", (name,)))
        elif process.state.state in (FrontState.BROKEN, FrontState.QUARANTINED):
            self.sim.perform(Action("die", (name,)))
        elif self.sim.sources and self.random.random() < 0.3:
            path = self.random.choice(sorted(self.sim.sources))
            self.sim.sources[path] = SimulatedSource("changed")
