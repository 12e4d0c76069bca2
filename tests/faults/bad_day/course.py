"""What a round is to be, how it goes, and what came of it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.bad_day.actions import ACTIONS
from tests.faults.bad_day.judge import Next, Verdict, View
from tests.faults.bad_day.publisher import TRANSPORTS, Answer

PHASES = ("idle", "planning", "staging", "verifying", "pausing", "installing", "invalidating", "resuming")


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


@dataclass
class Course:
    """One round as it goes. `rest`, `end`: what was seen before it, until there is something newer."""

    plan: Plan
    update: str
    before: View
    phase: str = ""
    answer: Answer | None = None
    next: list[Next] = field(default_factory=list)
    operator: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rest = self.end = self.before
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:7.3f} {text}")

    def did(self, verb: str, to: str) -> None:
        """What a person would have had to do."""
        self.operator[verb] += 1
        self.say(f"operator: {verb} {to}".rstrip())

    def report(self, verdict: Verdict, history: Mapping[str, Any]) -> Report:
        told = self.answer.outcome if self.answer is not None else ""
        outcome = told or str(history.get(self.update, {}).get("outcome", ""))
        seconds = time.monotonic() - self._began
        return Report(self.plan, verdict, outcome, self.phase, seconds, self.operator, tuple(self.log))


class NoRest(AssertionError):
    """The fleet did not come to rest."""
