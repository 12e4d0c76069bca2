"""A running update, followed from the trainer's side: its states, its lease, its hooks, its receipt or its error.

Two threads: one reads the events, one renews the lease. Both end with `close`, also when the network is down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from trainer_side.client import protocol
from trainer_side.client.causes import claimable
from trainer_side.client.client import Canceller
from trainer_side.client.protocol import HttpCall, HttpSteps
from updater.core.errors import Failure, LiveweightsError, Unavailable
from updater.protocol.answers import Receipt, UpdateState
from updater.protocol.problems import receipt_error

T = TypeVar("T")
_log = logging.getLogger("liveweights.trainer")
#: Seconds between two tries to hear of an update whose events broke off.
AGAIN_S = 0.25
ASK_S = 5.0
#: How long an update that was told to end may take to do so: discarding has a deadline of its own.
END_S = 90.0
#: Phases that an update enters only while every rank stands still, and those that only a verified one enters.
_PAUSED = frozenset(("deciding", "installing", "invalidating", "publishing", "resuming", "restoring"))
_STAGED = _PAUSED | {"ready", "pausing"}


@dataclass(frozen=True, slots=True)
class Hooks:
    """Called in a thread of the update's own, in this order, each at most once; what they raise is logged, no more.

    `on_staged`: every rank has voted for what it holds. `on_paused`: every rank stands still, requests are held back.
    Both are told soon after it happened and hold nothing up. Of an update that rolls back they may have been called.
    """

    on_staged: Callable[[UpdateState], None] | None = None
    on_paused: Callable[[UpdateState], None] | None = None
    on_committed: Callable[[Receipt], None] | None = None
    on_rolled_back: Callable[[Receipt], None] | None = None


class CoordinatorLink(Protocol):
    """What speaks to the coordinator: a `Client`, or what does the same. Used from any thread."""

    def run(self, steps: HttpSteps[T]) -> T:
        """Raises LiveweightsError."""

    def events(self, update: str, canceller: Canceller | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(`phase`, state), (`receipt`, receipt) and others, until the update ended. Raises Unavailable."""


class UpdateHandle:
    """One update, once begun. `on_end` is called from another thread as soon as it is known to have ended, once.

    `lease_s`: renewed three times within it; None: there is no lease.
    """

    def __init__(
        self,
        link: CoordinatorLink,
        state: UpdateState,
        *,
        lease_s: float | None,
        hooks: Hooks,
        on_end: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.id = state.id
        self._link, self._on_end = link, on_end
        self._hooks = HookCaller(hooks)
        self._changed = threading.Condition()
        self._state = state
        self._lost: LiveweightsError | None = None  # it is no longer known how it ends
        self._end_told = False
        self._closing = threading.Event()
        self._canceller = Canceller()
        self._threads = [threading.Thread(target=self._watch, name=f"liveweights-watch-{self.id}", daemon=True)]
        if lease_s is not None:
            renewal = threading.Thread(target=self._renew, args=(lease_s,), name="liveweights-lease", daemon=True)
            self._threads.append(renewal)
        for thread in self._threads:
            thread.start()

    # -- asked from the trainer's thread

    @property
    def state(self) -> UpdateState:
        """The newest that was heard."""
        with self._changed:
            return self._state

    def reached(self, what: Callable[[UpdateState], bool], timeout_s: float) -> bool:
        """Whether it has come to `what` within the time, or to its end."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over or what(self._state), timeout_s)

    def ended(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        return self.reached(lambda _state: False, timeout_s)

    def receipt(self) -> Receipt:
        """Of an update that ended. Raises what its outcome says if that is not `committed`, with the receipt."""
        with self._changed:
            receipt, lost = self._state.receipt, self._lost
        if receipt is not None:
            error = receipt_error(receipt)
            if error is not None:
                raise error
            return receipt
        raise lost or Unavailable(Failure("internal", f"update {self.id} has not ended"))

    def wait(self, timeout_s: float) -> Receipt:
        """The receipt. Raises Unavailable `unreachable` after `timeout_s`; the update goes on."""
        if not self.ended(timeout_s):
            raise Unavailable(Failure("unreachable", f"update {self.id} has not ended within {timeout_s:g} s"))
        return self.receipt()

    def seal(self, digests: Mapping[str, str]) -> UpdateState:
        return self._link.run(protocol.seal(self.id, digests))

    def commit(self) -> UpdateState:
        return self._link.run(protocol.commit(self.id))

    def abort(self, failures: Iterable[Failure] = ()) -> LiveweightsError | None:
        """Ask for the end, and say why as far as it is the trainer's to say. Returns what kept it from being asked."""
        causes = claimable(failures)
        told = self._abort(causes)
        # Of another release, or of a replica that is gone by now: the end matters more than its reason.
        return self._abort(()) if causes and told is not None and told.code == "bad_request" else told

    def _abort(self, causes: Sequence[Failure]) -> LiveweightsError | None:
        try:
            self._link.run(protocol.abort(self.id, causes))
        except LiveweightsError as error:
            return error
        return None

    def close(self) -> None:
        """Follow it no longer. Returns when both threads have ended."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._canceller()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a hook may close what it was called by
                thread.join()

    # -- the two threads

    @property
    def _path(self) -> str:
        return protocol.update_path(self.id)

    def _asked(self, call: HttpCall) -> UpdateState:
        return self._link.run(protocol.ask(UpdateState, call))

    @property
    def _over(self) -> bool:
        return self._state.receipt is not None or self._lost is not None

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                for name, data in self._link.events(self.id, self._canceller):
                    self._hear(name, data)
                # The end of the events is the end of the update, unless this reader was let go.
                self._take(self._asked(HttpCall("GET", self._path, timeout_s=ASK_S, tries=False)))
            except Unavailable:
                pass  # asked again; how long that makes sense is for the lease or the caller to say
            except LiveweightsError as error:
                self._lose(error)
            if self._over:
                return
            self._closing.wait(AGAIN_S)

    def _hear(self, name: str, data: Mapping[str, Any]) -> None:
        if name == "phase":
            self._take(UpdateState.model_validate(data))
        elif name == "receipt":
            receipt = Receipt.model_validate(data)
            ended = {"phase": "ended", "phases_ms": receipt.phases_ms, "receipt": receipt, "offer": None}
            self._take(self.state.model_copy(update=ended))

    def _take(self, state: UpdateState) -> None:
        """A thread that waits for the end also knows that the hooks have been called."""
        self._hooks.saw(state)
        with self._changed:
            self._state = state
            self._changed.notify_all()
        if state.receipt is not None:
            self._tell_end(state.receipt.reason or state.receipt.outcome)

    def _tell_end(self, reason: str) -> None:
        with self._changed:
            told, self._end_told = self._end_told, True
        if not told:
            self._on_end(reason)

    def _lose(self, error: LiveweightsError) -> None:
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()
        self._tell_end(error.code)

    def _lose_unless_told(self, error: LiveweightsError) -> None:
        """The events may yet bring the receipt."""
        with self._changed:
            told = self._changed.wait_for(lambda: self._over or self._closing.is_set(), END_S)
        if not told:
            self._lose(error)

    def _renew(self, lease_s: float) -> None:
        """A third of the lease apart. Once it has run out unrenewed the update is over, told or not."""
        renewed = time.monotonic()
        while not self._closing.wait(lease_s / 3):
            if self._over:
                return
            asked = time.monotonic()
            try:
                self._asked(HttpCall("POST", f"{self._path}/renew", timeout_s=lease_s / 3, tries=False))
                renewed = asked
            except Unavailable as error:
                if time.monotonic() - renewed >= lease_s:
                    self._tell_end("lease_expired")
                    self._lose_unless_told(error)
                    return
            except LiveweightsError as error:
                # It has ended; the events bring the receipt, and the stream stops now.
                self._tell_end(error.code)
                return


class HookCaller:
    """Turns the states of one update into calls. Used from one thread."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._called: set[str] = set()

    def saw(self, state: UpdateState) -> None:
        """Phases that passed unseen show in the timings."""
        seen = {state.phase, *state.phases_ms}
        if seen & _STAGED:
            self._call("on_staged", self._hooks.on_staged, state)
        if seen & _PAUSED:
            self._call("on_paused", self._hooks.on_paused, state)
        if state.receipt is not None and state.receipt.outcome == "committed":
            self._call("on_committed", self._hooks.on_committed, state.receipt)
        if state.receipt is not None and state.receipt.outcome == "rolled_back":
            self._call("on_rolled_back", self._hooks.on_rolled_back, state.receipt)

    def _call(self, name: str, hook: Callable[[T], None] | None, told: T) -> None:
        if name in self._called:
            return
        self._called.add(name)
        if hook is None:
            return
        try:
            hook(told)
        except Exception:  # the caller's code: it must not decide over the update
            _log.exception("the hook %s failed", name)
