"""A group as a medium: every bucket is broadcast to all receivers at once, from one of two buffers into one of two."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from transports.buckets import Bucket
from transports.media.gloo import GlooGroup
from transports.media.group_init import GroupInit, Relay
from transports.media.nccl import NcclGroup, device_name, nccl_works, refuse_shared_devices
from transports.media.work import CollectiveGroup, CollectiveWork, let_go, settle_device
from transports.stream.connection import Waker
from transports.stream.failures import named
from transports.stream.medium import Broken
from transports.stream.messages import AHEAD, Go, Hello, Key, Opening, seats_digest
from transports.stream.receiver_session import ReceiverSession, mismatch
from transports.stream.sender_session import Peer, SenderSession
from updater.core.errors import Aborted, Failure, refuse

#: (store, rank, size, this side's host, limit in seconds) -> one end of a group. Blocks; raises Broken.
MakeGroup = Callable[[Relay, int, int, str, float], CollectiveGroup]
BACKENDS: dict[str, MakeGroup] = {"gloo": GlooGroup, "nccl": NcclGroup}


def group_limit(patience_s: float) -> float:
    """How long a collective may take before the group itself gives up, in seconds: longer than either side's patience,
    since a group that breaks does not say through whom.
    """
    return 2 * patience_s + 30.0


class CollectiveSender:
    """A `SenderMedium`. `host`: this side's address, where receivers can connect to it. `make_group`: in place of the
    backend's. A group is kept while every receiver of the same seats still holds it.
    """

    lends, alike = False, True
    buffers = AHEAD

    def __init__(
        self, backend: Literal["gloo", "nccl"], host: str, patience_s: float, make_group: MakeGroup | None = None
    ) -> None:
        self.kind = backend
        self._host, self._limit_s = host, group_limit(patience_s)
        self._make_group = make_group
        self._group: CollectiveGroup | None = None
        self._name = ""
        self._init: GroupInit | None = None
        self._memory: list[torch.Tensor] = []
        self._wanted = 0

    def check(self) -> None:
        if self.kind not in BACKENDS:
            raise refuse("transport_unsupported", f"backend {self.kind!r} is none of {', '.join(BACKENDS)}")
        if self.kind == "nccl" and not nccl_works():
            raise refuse("transport_unsupported", "nccl needs a CUDA device and a torch that was built with it")

    def accepts(self, hello: Hello) -> Failure | None:
        return None

    def prepare(self, session: SenderSession, buffers: int, nbytes: int) -> str:
        self._wanted = nbytes
        seats = seats_digest(session.offer)
        hellos = {number: peer.hello for number, peer in session.peers.items() if peer.hello is not None}
        held = {hello.held for hello in hellos.values()} == {self._name}
        if self._group is None or not held or not self._name.startswith(f"{session.offer.session}.{seats}."):
            self._drop_group()
            if self.kind == "nccl":
                devices = {number: next(iter(hello.devices), "") for number, hello in hellos.items()}
                refuse_shared_devices(session.offer, device_name(), devices)
            # nothing of an earlier group can match
            self._name = f"{session.offer.session}.{seats}.{secrets.token_hex(4)}"
        return self._name

    def open(self, session: SenderSession, deadline: float) -> None:
        if self._group is None:
            self._group = self._form(session, deadline)
        if not self._memory or self._memory[0].numel() < self._wanted:
            self._memory = []
            self._memory = [self._group.room(self._wanted) for _ in range(AHEAD)]

    def heard(self, session: SenderSession, peer: Peer) -> bool:
        """Passed on to the others, and to this side while it is forming; not before it does."""
        if self._init is None and self._group is None:
            return True
        while peer.keys:
            key = peer.keys.popleft()
            if self._init is not None:
                self._init.relay.learn(key.name, bytes.fromhex(key.value))
            session.tell(key, but=peer)
        return True

    def room(self, buffer: int, nbytes: int) -> torch.Tensor:
        data = self._memory[buffer][:nbytes]
        if data.numel() != nbytes:  # gloo ends a process that is sent more than it has room for
            raise mismatch(f"a bucket of {nbytes} bytes is larger than the plan allows")
        return data

    def filled(self) -> None:
        settle_device()

    def post(self, buffer: int, nbytes: int, notify: Callable[[], None]) -> CollectiveWork:
        if self._group is None:
            raise Broken("there is no group")
        return self._group.broadcast(self.room(buffer, nbytes), notify)

    def left(self, peer: Peer, *, alive: bool) -> None:
        """The group of a receiver that left breaks by itself."""

    def drop(self) -> None:
        """The memory too: a collective that did not end may still read it."""
        init, self._init = self._init, None
        if init is not None:
            init.give_up()
        self._memory = []
        self._drop_group()

    def _form(self, session: SenderSession, deadline: float) -> CollectiveGroup:
        """Until this side is in the group; the others say so themselves."""
        make, size = self._make_group or BACKENDS[self.kind], len(session.peers) + 1
        init = GroupInit(lambda relay: make(relay, 0, size, self._host, self._limit_s), session.waker.set)
        self._init = init
        for peer in session.peers.values():
            self.heard(session, peer)  # what came with its answer
        while True:
            try:
                for name, value in init.outgoing():
                    session.tell(Key(name, value.hex()))
                if (group := init.group()) is not None:
                    self._init = None
                    return group
                session.hear(session.wait(session.peers.values(), deadline))
            except Broken as error:
                raise session.broke(error) from None
            except TimeoutError:
                late = [number for number, peer in session.peers.items() if not peer.joined]
                raise named(session.offer, "peer_timeout", late, "did not join the group") from None

    def _drop_group(self) -> None:
        group, self._group, self._name = self._group, None, ""
        let_go(group)


class CollectiveReceiver:
    """A `ReceiverMedium`: in the group that the sender names, over the backend that it names."""

    def __init__(self) -> None:
        self.held = ""
        self._waker = Waker()
        self.wakers: tuple[Waker, ...] = (self._waker,)
        self._group: CollectiveGroup | None = None
        self._memory: list[torch.Tensor] = []

    def greeting(self) -> tuple[tuple[str, ...], int]:
        name = device_name()
        return (name,) if name else (), 0

    def join(self, session: ReceiverSession, opening: Opening) -> None:
        if self.held != opening.name:
            self._form(session, opening)
        if self._group is not None and (not self._memory or self._memory[0].numel() < opening.plan.room):
            self._memory = []
            self._memory = [self._group.room(opening.plan.room) for _ in range(AHEAD)]

    def post(self, bucket: Bucket, go: Go) -> CollectiveWork:
        if self._group is None:
            raise Broken("there is no group")
        return self._group.broadcast(self.data(bucket, go), self._waker.set)

    def data(self, bucket: Bucket, go: Go) -> torch.Tensor:
        return self._memory[bucket.index % AHEAD][: bucket.nbytes]

    @contextmanager
    def taking(self) -> Iterator[None]:
        try:
            yield
        finally:
            settle_device()

    def drop(self) -> None:
        self._memory = []
        self._drop_group()
        self._waker.close()

    def _form(self, session: ReceiverSession, opening: Opening) -> None:
        self._drop_group()
        if opening.medium not in BACKENDS:
            raise Aborted(Failure("stream_mismatch", f"a stream over {opening.medium} buffers where a group was due"))
        make, rank, size = BACKENDS[opening.medium], session.number + 1, session.offer.receivers + 1
        host, limit_s = session.connection.host, group_limit(opening.patience_s)
        init = GroupInit(lambda relay: make(relay, rank, size, host, limit_s), self._waker.set)
        try:
            self._group, self.held = _formed(session, init), opening.name
        except BaseException:
            init.give_up()
            raise

    def _drop_group(self) -> None:
        group, self._group, self.held = self._group, None, ""
        let_go(group)


def _formed(session: ReceiverSession, init: GroupInit) -> CollectiveGroup:
    deadline = session.deadline()
    while True:
        for name, value in init.outgoing():
            session.connection.post(Key(name, value.hex()))
        while (message := session.heard(Key)) is not None:
            init.relay.learn(message.name, bytes.fromhex(message.value))
        try:
            group = init.group()
        except Broken as error:
            raise session.broke(error) from None
        if group is not None:
            return group
        session.wait(deadline, "the group did not form")
