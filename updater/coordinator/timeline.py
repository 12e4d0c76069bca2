"""Where the time of one update went, on the coordinator's clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from updater.core.state import Phase
from updater.schemas import Pause

#: Phases in which fronts are shut, and the part of the pause that each one counts to.
_PARTS = {
    Phase.DECIDING: "decide",
    Phase.INSTALLING: "install",
    Phase.INVALIDATING: "invalidate",
    Phase.PUBLISHING: "publish",
    Phase.RESUMING: "resume",
    Phase.RESTORING: "restore",
    Phase.REOPENING: "restore",
}


@dataclass(slots=True)
class Timeline:
    """Seconds per phase. A phase that is entered again (a later attempt) adds up."""

    started: float
    spent: dict[Phase, float] = field(default_factory=dict)
    _phase: Phase | None = None
    _since: float = 0.0

    def enter(self, phase: Phase, now: float) -> None:
        """The machine is in `phase` from `now` on."""
        self.leave(now)
        self._phase, self._since = phase, now
        self.spent.setdefault(phase, 0.0)

    def leave(self, now: float) -> None:
        """The phase that runs ends `now`; nothing is counted until the next one begins."""
        if self._phase is not None:
            self.spent[self._phase] += now - self._since
        self._phase = None

    def phases_ms(self, now: float) -> dict[str, float]:
        """Milliseconds of every phase that was entered, the running one up to `now`."""
        running = {self._phase: now - self._since} if self._phase is not None else {}
        return {
            phase.value: round(1e3 * (seconds + running.get(phase, 0.0)), 3) for phase, seconds in self.spent.items()
        }

    def pause(self) -> Pause | None:
        """The breakdown, or None if nothing was ever shut. Call it after `leave`."""
        if Phase.PAUSING not in self.spent:
            return None
        parts = dict.fromkeys(_PARTS.values(), 0.0)
        for phase, part in _PARTS.items():
            parts[part] += self.spent.get(phase, 0.0)
        quiesce, pause = self.spent[Phase.PAUSING], sum(parts.values())
        return Pause(
            closed_ms=round(1e3 * (quiesce + pause), 3),
            quiesce_ms=round(1e3 * quiesce, 3),
            pause_ms=round(1e3 * pause, 3),
            **{f"{part}_ms": round(1e3 * seconds, 3) for part, seconds in parts.items()},
        )
