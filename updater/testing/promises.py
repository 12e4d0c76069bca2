"""What must hold after everything that happens in a simulation, and what when it came to rest."""

from __future__ import annotations

from updater.core.fleet.state import Fleet, Phase, Standing
from updater.core.participant import DiskOffer, FrontState, SpareState
from updater.testing.shell import Shell
from updater.testing.values import Violation


class Watched(Shell):
    """A shell whose promises are checked."""

    def check(self) -> None:
        """Raise Violation if any promise is broken now."""
        last = self.published
        for process in self.replicas.values():
            process.check()
            label = process.admission
            if (process.name, process.incarnation) in self.removed:
                continue  # an operator said that it is dead; it serves until it hears that
            if process.state.state is FrontState.ORPHANED:
                raise Violation("I11", f"{process.name} was shut, and no operator has removed it")
            if label is not None and (last is None or label != (str(last.version), last.digest)):
                raise Violation("I1", f"{process.name} is open on {label}, live is {last and last.version}")
        if self.state is not None:
            self._check_coordinator(self.state)

    def _check_coordinator(self, state: Fleet) -> None:
        last = self.published
        if (
            not state.hold
            and state.live
            and last
            and state.live.label.digest != last.digest
            and state.phase is not Phase.PUBLISHING
        ):
            raise Violation("I3", f"live is {state.live.label}, published is {last.version}")
        update = state.update
        if update is not None and update.waiting and self.deadline is None and not update.recording:
            raise Violation("I9", f"waits for {sorted(update.waiting)} in {state.phase} without a deadline")
        if state.phase is Phase.IDLE and (update is not None or self.deadline is not None):
            raise Violation("I4", "idle with an update or a deadline left")

    def check_settled(self) -> None:
        """After `heal`: nothing hangs, nothing is held, every member serves the one live version or is joining."""
        state = self.state
        if state is None or state.phase is not Phase.IDLE or state.queue or self.open_updates:
            raise Violation("I4", f"not at rest: {state and state.phase}, unfinished {sorted(self.open_updates)}")
        for process in self.replicas.values():
            if process.state.spare.state is SpareState.UNKNOWN:
                continue  # its ranks failed to let go, and it says so
            if process.jobs or process.held or process.state.plan is not None:
                raise Violation("I6", f"{process.name} still holds {sorted(process.held)} {process.jobs}")
        for member in state.members:
            stuck = member.standing not in (Standing.OK, Standing.JOINING)
            process = self.replicas[member.replica]
            if stuck or (member.standing is Standing.OK) != (process.admission is not None):
                raise Violation("I9", f"{member.replica} is {member.standing}, its front {process.state.state}")
            if member.standing is Standing.JOINING and self._could_serve(state):
                raise Violation("I9", f"{member.replica} is not brought to the live version")

    def _could_serve(self, state: Fleet) -> bool:
        """Whether a joiner can be caught up at all: the source is known, still there and unchanged."""
        live = state.live
        if live is None or not isinstance(live.offer, DiskOffer):
            return False
        source = self.sources.get(live.offer.path)
        return source is not None and source.content == live.label.digest
