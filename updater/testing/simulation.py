"""A whole fleet in memory: the real machines, simulated replicas, a network, a journal and a clock that are all moved
by hand.

Nothing happens by itself. `actions()` lists what may happen next, `perform` lets one thing happen and then checks the
promises. Messages may be lost, repeated, late or out of order; a coordinator may crash before or after every effect.
Same actions, same history.
"""

from __future__ import annotations

from collections.abc import Callable

from updater.core.fleet.state import Phase
from updater.core.participant import FrontState
from updater.testing.happenings import Happenings
from updater.testing.values import Action, Packet, Violation


class Simulation(Happenings):
    """A fleet with no member yet. See `actions`, `perform`, `settle`."""

    # --- moving it by hand

    def run(
        self, *, until: Phase | None = None, hold: Callable[[Packet], bool] = lambda _: False, limit: int = 1000
    ) -> None:
        """What happens naturally, without retries and timers, up to the entry of phase `until`. Packets for which
        `hold` says yes stay on the wire.
        """
        for _ in range(limit):
            if until is not None and self.state is not None and self.state.phase is until:
                return
            kept = {packet.number for packet in self.wire if hold(packet)}
            ready = [action for action in self.actions() if not (action.kind == "deliver" and action.args[0] in kept)]
            if not ready:
                return
            self.perform(ready[0])

    def work(self, name: str, queue: str = "control", times: int | None = None) -> None:
        """Ranks of one replica do `times` pieces of work, or all there is."""
        process = self.replicas[name]
        while queue in process.jobs and times != 0:
            self.perform(Action("work", (name, queue)))
            times = None if times is None else times - 1

    def on_wire(self, verb: str, to: str = "") -> list[Packet]:
        """Requests for replica `to`, or replies of that verb."""
        return [packet for packet in self.wire if packet.to == to and getattr(packet.payload, "verb", "") == verb]

    # --- the end of a history

    def settle(self, *, timers: bool = True, limit: int = 4000) -> None:
        """Everything that can happen happens, on a network that loses nothing: first messages and work, then retries,
        and timers only when nothing else is left.
        """
        for _ in range(limit):
            natural = self.actions()
            if natural:
                self.perform(natural[0])
                continue
            waiting = [a for a in self.retries() if self.replicas[a.args[0]].alive]
            if waiting:
                self.perform(waiting[0])
                if not self.actions():
                    raise Violation("I9", f"{waiting[0]} has no effect")
                continue
            pending = self.timers() if timers else []
            if not pending:
                return
            self.perform(pending[0])
        raise Violation("I9", f"does not settle; last: {self.log[-12:]}")

    def heal(self) -> None:
        """Operators do what they must: the coordinator runs, broken and dead processes are replaced, all rejoin."""
        self.crash_in = None
        if self.state is None:
            self.restart()
        for _ in range(3):
            self.settle()
            self._end_hold()
            for name in list(self.replicas):
                self._repair(name)

    def _end_hold(self) -> None:
        """A coordinator that holds has listened long enough, or an operator does what it says."""
        if self.state is None or self.state.hold is None:
            return
        for name in self.replicas:
            self.do_call(name)
            self.settle()
        self.do_hold_ends()
        if self.state is not None and self.state.hold is not None:
            self.do_adopt_all()
        self.settle()

    def _repair(self, name: str) -> None:
        process = self.replicas[name]
        process.faults.clear()
        if process.alive and process.state.state is FrontState.QUARANTINED:
            self.do_readmit(name)
            self.settle()
        if process.alive and process.state.state in (FrontState.BROKEN, FrontState.QUARANTINED):
            process.die()
        if not process.alive:
            self.start_replica(name)
        if (name, process.incarnation) in self.removed:
            # It only stood still: it hears twice that it was removed, and joins again.
            self.do_call(name)
            self.settle()
            self.do_rejoin(name)
            self.settle()
        self.do_poll(name)
        self.settle()
        self.join(name)
        self.settle()
