"""One update over a pushed transport, tensor by tensor: begin, put, seal, commit, abort.

`push` is made of this; use it yourself where the tensors do not come from a `WeightSource`:

    with UpdateSession(client, sender, specs, version=7) as update:
        for name in specs:
            update.put(name, tensors[name])
        update.seal()
        receipt = update.wait()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

from trainer_side.client import protocol
from trainer_side.client.causes import cause_of
from trainer_side.client.handle import END_S, CoordinatorLink, Hooks, UpdateHandle
from trainer_side.client.packing import Packer
from trainer_side.client.protocol import UPDATE_S
from trainer_side.client.request import Progress, PushRequest, silent
from transports.buckets import BUCKET_BYTES, StreamPlan
from transports.stream import StreamSender
from updater.core.errors import Aborted, Failure, LiveweightsError, Unavailable, refuse
from updater.core.participant import StreamOffer
from updater.core.policy import Policy
from updater.core.version import Version
from updater.protocol import wire
from updater.protocol.answers import Receipt, UpdateState
from updater.protocol.manifest import Manifest, TensorEntry, TensorSpec

T = TypeVar("T")
P = ParamSpec("P")
#: How long receivers may take to appear once staging has begun, and one of them to take a bucket, in seconds.
MEET_S = 60.0
STALL_S = 30.0
#: Lease of a stream where the caller names none, as the coordinator has it too.
LEASE_S = 60.0
#: After a failure of the transport: how long the coordinator is left to learn the cause from its own side.
CAUSE_S = 2.0
_OF_PEERS = ("peer_lost", "peer_timeout")
#: What a client hears that is still inside an update that has ended.
_ECHOES = ("client_abort", "wrong_phase")
_UNSEALED = ("queued", "planning", "staging")


def promised(
    specs: Iterable[TensorSpec], digests: Mapping[str, str], ties: tuple[tuple[str, str], ...] = (), **more: Any
) -> Manifest:
    """The manifest of what is going to be sent. `more`: further fields of `Manifest`."""
    entries = (TensorEntry(spec.name, spec.dtype, spec.shape, digests.get(spec.name, "")) for spec in specs)
    manifest = Manifest(tensors=tuple(sorted(entries, key=lambda entry: entry.name)), ties=ties, **more)
    try:
        manifest.check()
    except wire.WireError as error:
        raise refuse("manifest_invalid", f"{error.where}: {error.why}") from None
    return manifest


class UpdateSession:
    """`specs` in the order in which the tensors will be put. `digests`: what is known of them (16 hex digits); the rest
    is computed as they pass and sealed. `sender`: open for many sessions, one at a time; it stays open. `version`: or a
    whole `PushRequest`, in the place of all arguments that it has too.

    Entering begins the update, waits until its receivers are known and meets them. Leaving by an exception aborts it;
    leaving otherwise waits for its receipt, and a session that was never sealed is an abort. While it lasts the lease
    is renewed, and when the update ends for another reason the sender is stopped, so that nothing hangs.

    Used from one thread, `interrupt` from any. Every method raises the typed errors of `updater.core.errors`; what
    ended the update comes with its receipt.
    """

    def __init__(
        self,
        link: CoordinatorLink,
        sender: StreamSender,
        specs: Mapping[str, TensorSpec],
        version: int | str | Version | PushRequest,
        *,
        digests: Mapping[str, str] | None = None,
        ties: tuple[tuple[str, str], ...] = (),
        manifest: Mapping[str, Any] | None = None,
        policy: Policy | Mapping[str, Any] | None = None,
        id: str | None = None,
        base_version: str | Version | None = None,
        lease_s: float | None = None,
        stall_s: float = STALL_S,
        timeout_s: float = UPDATE_S,
        bucket_bytes: int = BUCKET_BYTES,
        hooks: Hooks | None = None,
        progress: Progress = silent,
    ) -> None:
        known = {name: digest for name, digest in (digests or {}).items() if digest}
        self._link, self._sender = link, sender
        if not isinstance(version, PushRequest):
            version = PushRequest.of(
                version,
                policy=policy,
                id=id,
                base_version=base_version,
                lease_s=lease_s,
                timeout_s=timeout_s,
                hooks=hooks,
                progress=progress,
            )
        self._request = version
        self._lease_s = LEASE_S if version.lease_s is None else version.lease_s
        self._manifest = promised(specs.values(), known, ties, **(manifest or {}))
        self._plan = StreamPlan(tuple(specs.values()), bucket_bytes)
        self._plan.check()
        self._packer = Packer(self._plan, sender, known, stall_s)
        self._stall_s = stall_s
        self._running: UpdateHandle | None = None
        self._opened = False  # the sender has met, or tried to meet, the receivers
        self._sealed = False
        self._asked = False  # that the update end, by this session
        self._over = False  # the sender is done with it, one way or the other

    # -- the steps

    def begin(self) -> UpdateState:
        """Ask for the update. Raises what the coordinator refuses at the door."""
        sender = self._sender
        source = {"kind": sender.kind, "address": sender.address, "session": sender.session}
        body = {**self._request.body(), "source": source, "lease_s": self._lease_s}
        state = self._link.run(protocol.begin_streamed(body, self._manifest))
        self._running = UpdateHandle(
            self._link, state, lease_s=self._lease_s, hooks=self._request.hooks, on_end=self._stop_sender
        )
        return state

    def offered(self, timeout_s: float) -> bool:
        """Whether the receivers are known by now. Raises what ended the update before."""
        running = self._begun()
        if not running.reached(lambda state: state.offer is not None, timeout_s):
            return False
        if running.state.offer is None:
            self._over = True
            running.receipt()
            raise Aborted(Failure("internal", f"update {running.id} ended without a stream"))
        return True

    def open(self) -> None:
        """Meet the receivers of the offer."""
        state = self._begun().state
        if state.offer is None:
            raise refuse("wrong_phase", "no receiver is there yet")
        offer = wire.build(StreamOffer, state.offer.model_dump())
        self._opened = True
        self._guard(lambda: self._sender.open(offer, self._plan, MEET_S))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send the next tensor: CPU or device, contiguous or not; it may be overwritten when this returns.

        Raises Aborted: `stream_mismatch`, `tensor_unexpected`, `tensor_duplicate`, `tensor_shape`, `tensor_dtype` for
        a tensor that is not the one promised, and nothing of it was sent; or what ended the update.
        """
        self._begun()
        spec = self._packer.check(name, tensor)
        self._request.progress(self._guard(lambda: self._packer.send(spec, tensor)))

    def seal(self) -> None:
        """Everything was put: wait until it has arrived, and promise the digests that were computed on the way."""
        running = self._begun()
        self._packer.check_complete()
        self._guard(lambda: self._sender.finish(self._stall_s, normal=True))
        self._over = True
        try:
            running.seal(self._packer.digests)
        except Unavailable:
            raise
        except LiveweightsError as error:
            raise self._explained(error, self._settled()) from None
        self._sealed = True

    def commit(self) -> None:
        """Of an update with `commit: manual`: publish it once every rank has voted."""
        running = self._begun()
        try:
            running.commit()
        except Unavailable:
            raise
        except LiveweightsError as error:
            raise self._explained(error, self._settled()) from None

    def ended(self, timeout_s: float) -> bool:
        """Whether the update has ended within the time."""
        return self._begun().ended(timeout_s)

    def wait(self) -> Receipt:
        """The receipt of the committed update. Raises what else it ended as."""
        return self._begun().wait(self._request.timeout_s)

    def receipt(self) -> Receipt:
        """Of an update that ended. Raises what else than `committed` it ended as."""
        return self._begun().receipt()

    def interrupt(self, reason: str) -> None:
        """From any thread: what is under way ends soon with `client_abort`. Asks no coordinator; `abort` does."""
        self._sender.abort(reason)

    def abort(self, cause: LiveweightsError | None = None) -> LiveweightsError:
        """End the update and return what it ended as. `cause`: why, if the reason lies on this side; the coordinator is
        told of it as far as it is the trainer's to tell (`updater.protocol.api.CAUSES`).
        """
        running = self._begun()
        told = running.abort(() if cause is None else cause.failures)
        self._asked = self._asked or told is None
        self._release()
        return self._explained(cause or told, self._settled())

    def failed(self, error: LiveweightsError) -> LiveweightsError:
        """The error to raise for `error`, with the update ended: what the session raised itself has ended it."""
        return error if self._over else self.abort(error)

    def leave(self, cause: BaseException | None = None) -> None:
        """Let go of it: give the update up if its stream was not sealed yet."""
        try:
            if self._running is not None and not self._sealed and not self._running.ended(0):
                self.abort(_told(cause))
        finally:
            self._release()
            if self._running is not None:
                self._running.close()

    # -- as a block

    def __enter__(self) -> Self:
        try:
            self.begin()
            if not self.offered(self._request.timeout_s):
                raise self.abort(Unavailable(Failure("unreachable", "staging did not begin in time")))
            self.open()
        except BaseException as error:
            self.leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                if not self.ended(0):
                    self.abort(_told(error))
            elif not self._sealed:
                raise self.abort(Aborted(Failure("client_abort", "the block was left before the stream was sealed")))
            else:
                self.wait()
        finally:
            self.leave()

    # -- inside

    def _begun(self) -> UpdateHandle:
        if self._running is None:
            raise refuse("wrong_phase", "the update has not begun")
        return self._running

    def _stop_sender(self, reason: str) -> None:
        """Called by the update's threads when it has ended: a thread inside the sender comes back now."""
        if not self._over:
            self._sender.abort(f"the update ended: {reason}")

    def _guard(self, work: Callable[[], T]) -> T:
        """What the transport raises is told together with what the coordinator made of it."""
        if self._over:
            raise self._explained(None, self._settled())
        try:
            return work()
        except Aborted as error:
            raise self._broken(error) from None

    def _broken(self, error: Aborted) -> LiveweightsError:
        """The transport failed: the coordinator may be about to hear why, and is told to end it if it does not."""
        running = self._begun()
        running.reached(lambda state: state.phase not in _UNSEALED, CAUSE_S)
        if running.state.phase in _UNSEALED:
            # Before the receivers hear of it, whose word for it would be the sender's silence.
            self._asked = running.abort(error.failures) is None
        self._release()
        return self._explained(error, self._settled())

    def _release(self) -> None:
        """Receivers that still wait for this stream are told; the sender is free for the next one."""
        if self._opened and not self._over:
            self._sender.finish(self._stall_s, normal=False)
        self._over = True

    def _settled(self) -> LiveweightsError | None:
        """What the update ended as, or None if that is not known within its time."""
        running = self._begun()
        if not running.ended(END_S):
            return None
        try:
            running.receipt()
        except LiveweightsError as error:
            return error
        return None

    def _explained(self, here: LiveweightsError | None, there: LiveweightsError | None) -> LiveweightsError:
        """One error of two views. The cause comes first: what was seen here, if the coordinator only knows that it was
        told to stop from here, or what receivers heard from the sender; else what it says. That something was stopped
        because the update had ended explains nothing: what was heard of it here is left out, and what the coordinator
        says of it comes last, unless another client ended the update."""
        if there is None:
            return here or Unavailable(Failure("unreachable", "how the update ended is not known"))
        mine = () if here is None else here.failures
        told = [failure for failure in mine if failure.code not in _ECHOES]
        stopped = self._asked and any(each.code == "client_abort" and not each.replica for each in there.failures)
        echo = there.code in _OF_PEERS or stopped
        failures = (*told, *there.failures) if echo else (*there.failures, *told)
        asked_elsewhere = there.code == "client_abort" and not stopped
        causes_first = sorted(
            _distinct(failures), key=lambda each: each.code in _ECHOES and not (asked_elsewhere and not each.replica)
        )
        return type(there)(*causes_first, live_version=there.live_version, receipt=there.receipt)


def _told(error: BaseException | None) -> LiveweightsError | None:
    """What ended the block, as a cause; None where a user or a scheduler ends the program."""
    return cause_of(error) if isinstance(error, Exception) else None


def _distinct(failures: Iterable[Failure]) -> list[Failure]:
    """Without what is the same thing in shorter or longer words: the coordinator repeats what it was told."""
    found: dict[object, Failure] = {}
    for each in failures:
        found.setdefault((each.code, each.replica, each.rank, each.tensor, each.file), each)
    return list(found.values())


def _threaded(
    step: Callable[Concatenate[UpdateSession, P], T],
) -> Callable[Concatenate[AsyncUpdateSession, P], Coroutine[Any, Any, T]]:
    """A step of `UpdateSession` as one of its async twin."""

    @wraps(step)
    async def method(self: AsyncUpdateSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        running = asyncio.ensure_future(asyncio.to_thread(step, self._session, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._session.interrupt("cancelled")
            await asyncio.wait([running])
            raise

    return method


class AsyncUpdateSession:
    """The async twin: every step runs in a thread, so the event loop goes on; a cancelled step stops the sender."""

    def __init__(self, session: UpdateSession) -> None:
        self._session = session

    put = _threaded(UpdateSession.put)
    seal = _threaded(UpdateSession.seal)
    commit = _threaded(UpdateSession.commit)
    wait = _threaded(UpdateSession.wait)
    abort = _threaded(UpdateSession.abort)
    __aexit__ = _threaded(UpdateSession.__exit__)
    _enter = _threaded(UpdateSession.__enter__)

    async def __aenter__(self) -> Self:
        await self._enter()
        return self
