"""The loop between the pure fleet machine and the world: events in, effects performed in order, nothing awaited.

Everything runs on one event loop. `feed` works the queue off at once, so between the last acknowledgement of a phase
and the messages of the next there is no task switch, only the journal's write.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from updater.coordinator.clock import OrderedClock, Timer
from updater.coordinator.journal.journal import Journal, JournalError
from updater.coordinator.outbox import Outbox
from updater.core.errors import Failure
from updater.core.fleet import events as ev
from updater.core.fleet.effects import (
    Accepted,
    Admit,
    Append,
    Claimed,
    ClearDeadline,
    Denied,
    Effect,
    Finish,
    Forget,
    Send,
    SetBackoff,
    SetDeadline,
    Started,
    Stop,
)
from updater.core.fleet.machine import step
from updater.core.fleet.state import Fleet

_log = logging.getLogger("liveweights.coordinator")


class MachineObserver:
    """What the loop tells those who watch it, inside a step. May raise JournalError, nothing else."""

    def on_event(self, event: ev.Event) -> None:
        """An event is about to be handled."""

    def on_moved(self, before: Fleet, after: Fleet) -> None:
        """The phase, the hold or the update is another one."""

    def on_started(self, started: Started) -> None:
        """An update has its serial, and nothing was sent for it."""

    def on_finished(self, finish: Finish, before: Fleet) -> None:
        """An update ended. `before`: the state that the last step of it began in."""

    def on_admitted(self, replica: str) -> None:
        """The replica serves what is live."""

    def on_stopped(self, failure: Failure) -> None:
        """Nothing more will be done."""


class Machine:
    """Holds the fleet state. `feed` and `ask` must be called on the loop's thread.

    `observers` are told in their order.
    """

    def __init__(self, journal: Journal, clock: OrderedClock) -> None:
        self._journal, self._clock = journal, clock
        self.observers: tuple[MachineObserver, ...] = ()
        self._outbox: Outbox | None = None
        self._queue: deque[ev.Event] = deque()
        self._running = False
        self._answer: Accepted | Denied | Claimed | None = None
        self._deadline: Timer | None = None
        self._backoff: Timer | None = None
        self.stopped: Failure | None = None
        self.state = Fleet(fleet="", epoch=0)

    def attach(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def begin(self, state: Fleet, effects: tuple[Effect, ...]) -> None:
        """Start from what recovery found."""
        before, self.state = self.state, state
        self._journal.on_error = self._journal_failed
        self._tell(lambda each: each.on_moved(before, state))
        self._perform_all(effects)
        self._work()

    def feed(self, event: ev.Event) -> None:
        """Take one event. Called from inside a step, it is handled after that step."""
        self._queue.append(event)
        self._work()

    def ask(self, event: ev.ClientEvent) -> Accepted | Denied | Claimed:
        """Take a client's event and return its answer."""
        if self.stopped is not None:
            return Denied((self.stopped,))
        if self._running:
            raise RuntimeError("a client's event inside a step")
        self._answer = None
        self.feed(event)
        answer: Accepted | Denied | Claimed | None = self._answer
        if answer is None:
            return Denied((self.stopped or Failure("internal", f"{type(event).__name__} was not answered"),))
        return answer

    def _journal_failed(self, error: JournalError) -> None:
        """Outside a step the machine stops before the error travels on; inside one the step sees the error itself."""
        if not self._running:
            self.feed(ev.JournalFailed(error.failures[0]))

    def _work(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while self._queue and self.stopped is None:
                self._step(self._queue.popleft())
        finally:
            self._running = False

    def _step(self, event: ev.Event) -> None:
        before = self.state
        try:
            self._tell(lambda each: each.on_event(event))
            self.state, effects = step(before, event)
        except Exception as error:  # the fleet boundary: a machine in an unknown state must not go on
            _log.exception("the machine failed on %s", type(event).__name__)
            self.stop(Failure("internal", f"{type(error).__name__} on {type(event).__name__}"))
            return
        self._perform_all(effects, before)

    def _perform_all(self, effects: tuple[Effect, ...], before: Fleet | None = None) -> None:
        """In order. After a failed journal nothing that was asked for beyond it may happen (I8).

        `before`: the state that the step began in; observers hear of the move first.
        """
        was_running, self._running = self._running, True
        try:
            if before and _moved(before, self.state):
                self._tell(lambda each: each.on_moved(before, self.state))
            for effect in effects:
                self._perform(effect, before or self.state)
                if self.stopped is not None:
                    return
        except JournalError as error:
            _log.error("%s", error)
            self._queue.clear()
            self._queue.append(ev.JournalFailed(error.failures[0]))
        finally:
            self._running = was_running

    def _perform(self, effect: Effect, before: Fleet) -> None:
        match effect:
            case Send():
                if self._outbox is not None:
                    self._outbox.send(effect)
            case Append(record):
                self._journal.append(record, self._clock.stamp())
                self._queue.append(ev.Recorded(record.kind.value, record.serial, record.attempt))
            case Accepted() | Denied() | Claimed():
                self._answer = effect
            case Started():
                self._tell(lambda each: each.on_started(effect))
            case Finish():
                self._tell(lambda each: each.on_finished(effect, before))
            case Admit(replica):
                self._tell(lambda each: each.on_admitted(replica))
            case Forget(replica):
                if self._outbox is not None:
                    self._outbox.forget(replica)
            case Stop(failure):
                self.stop(failure)
            case _:
                self._time(effect)

    def _time(self, effect: Effect) -> None:
        match effect:
            case SetDeadline(phase, serial, attempt, seconds):
                self._clear_deadline()
                self._deadline = self._later(seconds, ev.Deadline(phase, serial, attempt))
            case ClearDeadline():
                self._clear_deadline()
            case SetBackoff(serial, attempt, seconds):
                self._backoff = self._later(seconds, ev.BackoffEnded(serial, attempt))
            case _:
                raise TypeError(f"not an effect: {effect!r}")

    def _later(self, seconds: float, event: ev.Event) -> Timer:
        return self._clock.call_later(seconds, _feeder(self.feed, event))

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def stop(self, failure: Failure) -> None:
        """Perform nothing more, whatever event comes. Pause leases reopen what has not installed."""
        if self.stopped is not None:
            return
        self.stopped = failure
        self._queue.clear()
        self._clear_deadline()
        if self._backoff is not None:
            self._backoff.cancel()
        self._tell(lambda each: each.on_stopped(failure))

    def _tell(self, what: Callable[[MachineObserver], None]) -> None:
        for observer in self.observers:
            what(observer)

    @property
    def live_version(self) -> str | None:
        """What serves now, as a label."""
        return str(self.state.live.label.version) if self.state.live is not None else None


def _feeder(feed: Callable[[ev.Event], None], event: ev.Event) -> Callable[[], None]:
    return lambda: feed(event)


def _moved(before: Fleet, after: Fleet) -> bool:
    return (after.phase, after.hold) != (before.phase, before.hold) or after.update is not before.update
