"""The sender of a broadcast: the trainer's end, with two buffers, of which one is filled while the other travels."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from transports.broadcast.conduct import Round
from transports.broadcast.forming import Relay
from transports.broadcast.groups import BACKENDS, check_backend, device_name, settle_device
from transports.broadcast.line import accepted, join_address, listen, seats_digest
from transports.broadcast.meeting import Meeting
from transports.broadcast.messages import End, Go, Opening, encode, group_limit
from transports.broadcast.peers import Peer
from transports.broadcast.pending import Group, let_go
from transports.buckets import BUCKET_BYTES, Bucket, StreamPlan
from transports.control.blame import place
from transports.control.channel import RECEIVER_LIMIT, Alarm
from transports.control.messages import LONGEST_PATIENCE_S, SIGN_S
from transports.digest import tensor_digest, to_hex
from updater import wire
from updater.core.errors import Aborted, Failure
from updater.core.participant import StreamOffer

PATIENCE_S = 30.0
MakeGroup = Callable[[Relay, int, int, str, float], Group]


class BroadcastSender:
    """A `transports.stream.StreamSender`.

    `host`, `port`: where it listens (port 0: any free one); `advertise`: the host that receivers are given, where that
    is another one. `backend`: "gloo", or "nccl" (experimental). `patience_s`: how long receivers wait for a sender that
    gives no sign. `digests`: of every bucket's bytes, so that bytes which changed on the way are found there and named.
    `bucket_bytes`: for the code that makes the plan. `make_group`: in place of the backend's.

    Listens at once. Raises OSError, Rejected `transport_unsupported`.
    """

    kind = "broadcast"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertise: str = "",
        backend: str = "gloo",
        bucket_bytes: int = BUCKET_BYTES,
        patience_s: float = PATIENCE_S,
        digests: bool = False,
        make_group: MakeGroup | None = None,
    ) -> None:
        check_backend(backend)
        self.bucket_bytes = bucket_bytes
        self._backend = backend
        self._make_group = make_group or BACKENDS[backend]
        self._patience_s = min(patience_s, LONGEST_PATIENCE_S)
        self._digests = digests
        self._bound = (host, port)
        self._host = advertise or host
        self._listener = listen(host, port)
        self._alarm = Alarm()
        self._lock = threading.Lock()  # of listener and session, and of the next three: `abort` shares them
        self._session = _fresh_name()
        self._address = join_address(self._host, self._listener.getsockname()[1])
        self._round: Round | None = None
        self._aborted = ""
        self._closed = False
        self._peers: list[Peer] = []  # from here on: kept between updates that end well
        self._group: Group | None = None
        self._group_name = ""
        self._slots: list[torch.Tensor] = []

    @property
    def address(self) -> str:
        """Another port with every session, if any may be taken: who comes late for an ended one knows it at once."""
        return self._address

    @property
    def session(self) -> str:
        return self._session

    def open(self, offer: StreamOffer, plan: StreamPlan, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        with self._ending_badly():
            run = self._enter(offer, plan)
            _check(plan)
            meeting = Meeting(offer, self._listener, self._peers, run.wait)
            self._peers = meeting.peers
            run.peers = meeting.gather(deadline)
            name = self._group_for(run)
            within = min(max(deadline_s, 0.001), LONGEST_PATIENCE_S)
            opening = Opening(plan, plan.digest, name, self._backend, within, self._patience_s)  # type: ignore[arg-type]
            meeting.agree(encode(opening), deadline)
            if self._group is None:
                self._group, self._group_name = run.form(self._maker(run), deadline), name
            run.until(lambda peer: peer.formed, deadline, "did not join the group")
            if not self._slots or self._slots[0].numel() < plan.room:
                self._slots = []
                self._slots = [self._group.room(plan.room) for _ in range(2)]

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        """Free, since a bucket is posted only when the one before has left."""
        with self._ending_badly():
            self._running()[0].hear_now()
            return self._slots[bucket.index % 2][: bucket.nbytes]

    def send(self, bucket: Bucket, deadline_s: float) -> None:
        with self._ending_badly():
            run, group = self._running()
            data = self._slots[bucket.index % 2][: bucket.nbytes]
            if data.numel() != bucket.nbytes:  # gloo ends a process that is sent more than it has room for
                raise Aborted(Failure("stream_mismatch", f"bucket {bucket.index} is larger than the plan allows"))
            settle_device()
            digest = to_hex(tensor_digest(data)) if self._digests else ""
            run.post(group, data, encode(Go(bucket.index, bucket.nbytes, digest)), time.monotonic() + deadline_s)

    def finish(self, deadline_s: float, *, normal: bool) -> None:
        if not normal:
            self._end(Failure("peer_lost", "the sender gave up"))
            return
        deadline = time.monotonic() + deadline_s
        with self._ending_badly():
            run, _ = self._running()
            run.settle(deadline)
            run.tell(encode(End(run.sent)))
            run.until(lambda peer: peer.done, deadline, "did not put everything in its place")
            with self._lock:
                if self._aborted:
                    raise Aborted(Failure("client_abort", self._aborted))
                self._round = None
            for peer in self._peers:
                peer.next_update()

    def abort(self, reason: str) -> None:
        """With nothing under way only the session is another one then: an offer that was made is void."""
        with self._lock:
            if self._round is None:
                self._renew()
            else:
                self._aborted = reason or "aborted"
                self._alarm.ring()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end(Failure("peer_lost", "the sender has ended"))
            self._alarm.close()

    def _enter(self, offer: StreamOffer, plan: StreamPlan) -> Round:
        with self._lock:
            if self._closed or self._round is not None:
                raise _misused("closed" if self._closed else "an update is under way")
            if offer.session != self._session:
                raise Aborted(Failure("client_abort", "the session of this offer has been ended"))
            self._round = Round(offer, plan, self._alarm, lambda: self._aborted, min(SIGN_S, self._patience_s / 3))
            return self._round

    def _running(self) -> tuple[Round, Group]:
        if self._round is None or self._group is None:
            raise _misused("no update is under way")
        return self._round, self._group

    def _group_for(self, run: Round) -> str:
        """The name of the group kept, if every receiver of these seats still is in it; else of one to be formed."""
        seats = seats_digest(run.offer)
        hellos = {peer.number: peer.hello for peer in run.peers.values() if peer.hello is not None}
        held = {hello.held for hello in hellos.values()} == {self._group_name}
        if self._group is not None and held and self._group_name.startswith(f"{self._session}.{seats}."):
            return self._group_name
        self._drop_group()
        if self._backend == "nccl":
            refuse_shared_devices(run.offer, device_name(), {n: hello.device for n, hello in hellos.items()})
        return f"{self._session}.{seats}.{secrets.token_hex(4)}"  # nothing of an earlier group can match

    def _maker(self, run: Round) -> Callable[[Relay], Group]:
        make, size, host, limit = self._make_group, len(run.peers) + 1, self._host, group_limit(self._patience_s)
        return lambda relay: make(relay, 0, size, host, limit)

    @contextmanager
    def _ending_badly(self) -> Iterator[None]:
        """Whatever goes wrong ends the update for all."""
        try:
            yield
        except BaseException as error:
            why = error.failures[0] if isinstance(error, Aborted) else Failure("internal", type(error).__name__)
            told = Failure(
                "peer_lost", f"the sender ended the update: {why.code}: {why.message}", why.replica, why.rank
            )
            self._end(told)
            raise

    def _end(self, why: Failure) -> None:
        """Not normally: nothing of this session is used again."""
        for line in accepted(self._listener, RECEIVER_LIMIT):
            Peer(line).hang_up(why)
        with self._lock:
            run, self._round, self._aborted = self._round, None, ""
            self._renew()
        for peer in self._peers:
            peer.hang_up(why)
        self._peers = []
        if run is not None and run.drop():
            self._slots = []
        self._drop_group()

    def _renew(self) -> None:
        """Another session. With the lock."""
        self._session = _fresh_name()
        if self._closed:
            self._listener.close()
        elif not self._bound[1]:
            self._listener.close()
            self._listener = listen(*self._bound)
            self._address = join_address(self._host, self._listener.getsockname()[1])

    def _drop_group(self) -> None:
        group, self._group, self._group_name = self._group, None, ""
        let_go(group)


def _check(plan: StreamPlan) -> None:
    try:
        plan.check()
    except wire.WireError as error:
        raise Aborted(Failure("stream_mismatch", f"{error.where}: {error.why}")) from None


def refuse_shared_devices(offer: StreamOffer, own: str, devices: Mapping[int, str]) -> None:
    """nccl takes no two ranks on one device. `own`: UUID of the sender's. Raises Aborted `transport_unsupported`."""
    taken = [own, *devices.values()]
    wrong = [n for n, device in devices.items() if not device or taken.count(device) > 1]
    if wrong:
        failure = Failure(
            "transport_unsupported",
            "nccl needs a device of its own for every rank",
            hint="push by transport='cuda_ipc' where ranks share a card, or with sender_options={'backend': 'gloo'}",
        )
        raise Aborted(*(place(offer, number, failure) for number in sorted(wrong)))


def _misused(why: str) -> Aborted:
    return Aborted(Failure("wrong_phase", why))


def _fresh_name() -> str:
    return secrets.token_hex(16)
