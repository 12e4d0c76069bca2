"""One pushed update: what is asked, what is sent, and how it ends by each that can end it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from trainer_side.client import protocol
from trainer_side.client.client import Client
from trainer_side.client.handle import Hooks
from trainer_side.client.session import AsyncUpdateSession, UpdateSession
from trainer_side.testing import FakeCoordinator, RecordingSender
from transports.digest import tensor_digest, to_hex
from transports.dtypes import DTYPE_NAMES
from transports.testing import tensor_bytes
from updater.core.errors import Aborted, Failure, LiveweightsError, Rejected, RolledBack
from updater.protocol.answers import Receipt, UpdateState
from updater.protocol.manifest import Manifest, TensorSpec

pytestmark = pytest.mark.slow  # together, not each

#: Small buckets, so that tensors share some and fill others.
BUCKET = 1024
TENSORS = {
    "a": torch.arange(300, dtype=torch.float32).reshape(20, 15),
    "b": torch.arange(64, dtype=torch.float32).reshape(8, 8).t(),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
    "c": torch.arange(700, dtype=torch.int16)[::2],
}


def specs(tensors: Mapping[str, torch.Tensor] = TENSORS) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}


def digest(name: str) -> str:
    return to_hex(tensor_digest(TENSORS[name]))


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as running:
        yield running


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[Client]:
    with Client(coordinator.url, "") as made:
        yield made


@pytest.fixture
def sender() -> RecordingSender:
    return RecordingSender()


def session(client: Client, sender: RecordingSender, **more: Any) -> UpdateSession:
    return UpdateSession(client, sender, specs(), 7, **{"bucket_bytes": BUCKET, **more})


def put_all(update: UpdateSession) -> None:
    for name, tensor in TENSORS.items():
        update.put(name, tensor)


def published(client: Client, sender: RecordingSender, *steps: Callable[[UpdateSession], object], **more: Any) -> None:
    """A whole session that does these steps."""
    with session(client, sender, **more) as update:
        for step in steps:
            step(update)


def verbs(coordinator: FakeCoordinator) -> list[str]:
    """What was posted, without renewals."""
    return [path.rpartition("/")[2] for path in coordinator.paths if path.rpartition("/")[2] in ("seal", "abort")]


def test_everything_is_sent_once_in_order_and_sealed(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    with session(client, sender, digests={"a": digest("a")}, ties=(("x", "a"),), policy={"quiesce_s": 5.0}) as update:
        put_all(update)
        update.seal()
        receipt = update.wait()
    assert receipt.outcome == "committed"
    begun, sealed = coordinator.bodies[0], next(body for body in coordinator.bodies if "digests" in body)
    assert begun["source"] == {"kind": "broadcast", "address": sender.address, "session": "s0"}
    assert (begun["version"], begun["policy"], begun["lease_s"]) == (7, {"quiesce_s": 5.0}, 60.0)
    manifest = Manifest.from_json(json.dumps(begun["manifest"]))
    assert manifest.specs() == specs()
    assert {entry.name: entry.digest for entry in manifest.tensors if entry.digest} == {"a": digest("a")}
    assert manifest.ties == (("x", "a"),)
    assert sealed == {"digests": {name: digest(name) for name in TENSORS if name != "a"}}
    assert {n: bytes(sender.bytes.get(n, b"")) for n in TENSORS} == {n: tensor_bytes(t) for n, t in TENSORS.items()}
    assert [bucket.index for bucket in sender.buckets] == list(range(len(sender.buckets)))
    assert len(sender.buckets) > 1
    assert sender.ends == [True]
    assert verbs(coordinator) == ["seal"]
    assert not sender.closed


@pytest.mark.case("F31")
def test_a_view_that_is_negated_only_in_name_is_sent_as_it_reads(client: Client, sender: RecordingSender) -> None:
    negated = torch.complex(torch.zeros(20, 15), -TENSORS["a"]).conj().imag
    with session(client, sender) as update:
        for name, tensor in {**TENSORS, "a": negated}.items():
            update.put(name, tensor)
        update.seal()
    assert bytes(sender.bytes["a"]) == tensor_bytes(TENSORS["a"])


def test_one_bucket_at_a_time_is_held(client: Client, sender: RecordingSender) -> None:
    with session(client, sender) as update:
        put_all(update)
        update.seal()
    assert 0 < sender.most_held <= BUCKET


def test_a_large_manifest_travels_ahead(coordinator: FakeCoordinator, client: Client, sender: RecordingSender) -> None:
    with session(client, sender, manifest={"source_revision": "x" * protocol.INLINE_MANIFEST}) as update:
        put_all(update)
        update.seal()
    ((path, text),) = coordinator.uploads.items()
    digest_of = Manifest.from_json(text).digest
    assert (path, coordinator.bodies[0]["manifest"]) == (f"/v1/manifests/{digest_of}", digest_of)


@pytest.mark.parametrize(
    ("name", "tensor", "code"),
    [
        ("b", TENSORS["b"], "stream_mismatch"),
        ("unknown", TENSORS["a"], "tensor_unexpected"),
        ("a", TENSORS["a"][:10], "tensor_shape"),
        ("a", torch.empty(0), "tensor_shape"),
        ("a", TENSORS["a"].double(), "tensor_dtype"),
        ("a", TENSORS["a"].to("meta"), "bad_request"),
    ],
)
def test_what_was_not_promised_is_refused_at_once(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender, name: str, tensor: torch.Tensor, code: str
) -> None:
    with pytest.raises(Aborted) as caught, session(client, sender) as update:
        update.put(name, tensor)
    assert [(failure.code, failure.tensor) for failure in caught.value.failures] == [(code, name)]
    assert sender.buckets == []
    assert sender.ends == [False]
    assert verbs(coordinator) == ["abort"]


def test_a_refused_tensor_may_be_put_right(client: Client, sender: RecordingSender) -> None:
    with session(client, sender) as update:
        with pytest.raises(Aborted):
            update.put("a", TENSORS["a"][:10])
        put_all(update)
        with pytest.raises(Aborted) as caught:
            update.put("a", TENSORS["a"])
        assert caught.value.code == "tensor_duplicate"
        update.seal()
    assert sender.ends == [True]


def test_a_stream_with_a_hole_cannot_be_sealed(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    with pytest.raises(Aborted) as caught:
        published(client, sender, lambda update: update.put("a", TENSORS["a"]), UpdateSession.seal)
    assert {(failure.code, failure.tensor) for failure in caught.value.failures} == {
        ("tensor_missing", name) for name in TENSORS if name != "a"
    }
    assert verbs(coordinator) == ["abort"]


def test_an_exception_in_the_block_aborts(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    with pytest.raises(KeyError):
        published(
            client, sender, lambda update: update.put("a", TENSORS["a"]), lambda _update: dict[str, int]()["trainer"]
        )
    assert (sender.ends, sender.session, verbs(coordinator)) == ([False], "s1", ["abort"])


@pytest.mark.parametrize("goes_wrong", [False, True])
def test_a_sealed_update_that_waits_for_its_commit_is_aborted_by_an_exception_too(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender, goes_wrong: bool
) -> None:
    last = (lambda _update: dict[str, int]()["trainer"]) if goes_wrong else UpdateSession.commit
    steps = (put_all, UpdateSession.seal, last)
    if goes_wrong:
        with pytest.raises(KeyError):
            published(client, sender, *steps, policy={"commit": "manual"})
    else:
        published(client, sender, *steps, policy={"commit": "manual"})
    assert sender.ends == [True]
    assert verbs(coordinator) == (["seal", "abort"] if goes_wrong else ["seal"])
    assert coordinator.state["receipt"]["outcome"] == ("aborted" if goes_wrong else "committed")


def test_a_block_left_without_a_seal_is_an_abort_and_says_so(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    with pytest.raises(Aborted) as caught, session(client, sender) as update:
        put_all(update)
    assert caught.value.code == "client_abort"
    assert caught.value.receipt is not None
    assert verbs(coordinator) == ["abort"]


def test_what_is_refused_at_the_door_opens_no_sender(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    coordinator.problem = 412, {"outcome": "rejected", "failures": [{"code": "stale_version", "message": ""}]}
    with pytest.raises(Rejected) as caught, session(client, sender):
        raise AssertionError("it began")
    assert caught.value.code == "stale_version"
    assert (sender.offer, sender.ends, verbs(coordinator)) == (None, [], [])


def test_what_planning_refuses_opens_no_sender(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    def refused() -> tuple[int, dict[str, Any]]:
        coordinator.begin(coordinator.bodies[-1])
        coordinator.end("rejected", "tensor_missing", replica="r0", rank=1, tensor="z")
        return 200, coordinator.state

    coordinator.answers["updates"] = refused
    with pytest.raises(Rejected) as caught, session(client, sender):
        raise AssertionError("it began")
    (failure,) = caught.value.failures
    assert (failure.code, failure.replica, failure.rank, failure.tensor) == ("tensor_missing", "r0", 1, "z")
    assert caught.value.receipt is not None
    assert (sender.offer, sender.ends, verbs(coordinator)) == (None, [], [])


def test_the_transports_word_and_the_coordinators_are_told_together(
    coordinator: FakeCoordinator, client: Client
) -> None:
    """The coordinator knows only that it was told to stop: the peer's name comes first."""
    lost = Failure("peer_timeout", "did not take bucket 1", replica="r0", rank=1)
    sender = RecordingSender(fail=(1, Aborted(lost)))
    with pytest.raises(Aborted) as caught, session(client, sender) as update:
        put_all(update)
    assert caught.value.failures[0] == lost
    assert [failure.code for failure in caught.value.failures] == ["peer_timeout", "client_abort"]
    assert caught.value.receipt is not None
    assert (sender.ends, verbs(coordinator)) == ([False], ["abort"])


def test_what_the_coordinator_knows_comes_first(coordinator: FakeCoordinator, client: Client) -> None:
    lost = Failure("peer_lost", "gone", replica="r0", rank=1)
    sender = RecordingSender(fail=(0, Aborted(lost)))

    def dies(update: UpdateSession) -> None:
        coordinator.end("aborted", "rank_died", replica="r0", rank=1)
        assert update.ended(60)  # heard of: whether in time is another story

    with pytest.raises(Aborted) as caught:
        published(client, sender, dies, put_all)
    assert [failure.code for failure in caught.value.failures] == ["rank_died", "peer_lost"]
    assert verbs(coordinator) == []


@pytest.mark.case("F20")
@pytest.mark.parametrize("code", ["lease_expired", "superseded", "client_abort", "peer_lost", "peer_timeout"])
def test_an_update_that_ends_elsewhere_stops_the_sender(
    coordinator: FakeCoordinator, client: Client, code: str
) -> None:
    sender = RecordingSender(block=1)

    def end() -> None:
        sender.blocked.wait(30)
        coordinator.end("aborted", code)

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(Aborted) as caught, session(client, sender) as update:
        put_all(update)
    ending.join()
    assert caught.value.code == code
    assert len(sender.aborts) == 1
    assert sender.ends == [False]
    assert verbs(coordinator) == []


@pytest.mark.case("F20")
@pytest.mark.parametrize("code", ["peer_lost", "tensor_digest"])
def test_a_seal_that_comes_after_the_end_hears_the_cause_first(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender, code: str
) -> None:
    """The coordinator answers `wrong_phase` to what comes late: that is no cause."""

    def ends(_update: UpdateSession) -> None:
        coordinator.end("aborted", code, replica="r0", rank=1)

    with pytest.raises(Aborted) as caught:
        published(client, sender, put_all, ends, UpdateSession.seal)
    assert [failure.code for failure in caught.value.failures] == [code]


def test_an_end_is_told_to_the_sender_once(coordinator: FakeCoordinator, client: Client) -> None:
    """The events bring it, and what is asked after them again: by then the sender may be with the next update."""
    sender = RecordingSender()
    update = session(client, sender)
    update.begin()
    coordinator.end("aborted", "superseded")
    assert update.ended(60)
    update._running.close()  # type: ignore[union-attr]
    assert len(sender.aborts) == 1


def test_the_lease_is_renewed_and_a_renewal_that_comes_too_late_stops_the_sender(
    coordinator: FakeCoordinator, client: Client
) -> None:
    """The events do not tell of it: the renewal alone must notice."""
    sender = RecordingSender(block=1)
    refused = threading.Event()

    def late() -> tuple[int, dict[str, Any]] | None:
        if not sender.blocked.is_set():
            return None
        refused.set()
        return 409, {"failures": [{"code": "lease_expired", "message": ""}]}

    coordinator.answers["renew"] = late
    with pytest.raises(Aborted), session(client, sender, lease_s=6.0) as update:
        put_all(update)
    assert refused.is_set()
    assert sender.aborts


def test_a_fleet_that_rolls_back_is_a_rolled_back_push(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    called: list[tuple[str, object]] = []
    hooks = Hooks(
        *(lambda told, name=name: called.append((name, told)) for name in ("staged", "paused", "done", "back"))
    )
    coordinator.answers["seal"] = _ends_with(coordinator, "rolled_back")
    with pytest.raises(RolledBack) as caught:
        published(client, sender, put_all, UpdateSession.seal, hooks=hooks)
    assert caught.value.code == "rank_failed"
    assert [name for name, _told in called] == ["staged", "paused", "back"]
    assert isinstance(called[-1][1], Receipt)


def _ends_with(coordinator: FakeCoordinator, outcome: str) -> Any:
    def answer() -> tuple[int, dict[str, Any]]:
        for phase in ("verifying", "pausing", "deciding", "installing"):
            coordinator.enter(phase)
        coordinator.end(outcome, "rank_failed" if outcome != "committed" else None)
        return 200, coordinator.state

    return answer


def test_hooks_hear_once_and_in_order_and_break_nothing(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    called: list[tuple[str, object]] = []

    def hook(name: str) -> Any:
        def call(told: object) -> None:
            called.append((name, told))
            raise ValueError(name)

        return call

    coordinator.answers["seal"] = _ends_with(coordinator, "committed")
    hooks = Hooks(hook("staged"), hook("paused"), hook("committed"), hook("rolled_back"))
    with session(client, sender, hooks=hooks) as update:
        put_all(update)
        update.seal()
        assert update.wait().outcome == "committed"
        assert [name for name, _told in called] == ["staged", "paused", "committed"]
    assert isinstance(called[0][1], UpdateState)
    assert isinstance(called[2][1], Receipt)


def test_no_thread_is_left(client: Client, sender: RecordingSender) -> None:
    before = followers()
    with session(client, sender, lease_s=600.0) as update:
        assert len(followers() - before) == 2
        put_all(update)
        update.seal()
    assert followers() <= before


def followers() -> set[threading.Thread]:
    """Of all sessions of this process."""
    return {
        thread for thread in threading.enumerate() if thread.name.startswith(("liveweights-watch", "liveweights-lease"))
    }


def test_a_session_can_be_left_while_the_coordinator_says_nothing(
    coordinator: FakeCoordinator, client: Client, sender: RecordingSender
) -> None:
    """The reader of the events waits for the next one; it is cut off."""
    before = followers()
    update = session(client, sender)
    update.begin()
    assert update.offered(30)
    assert len(followers() - before) == 2
    update._running.close()  # type: ignore[union-attr]
    assert followers() <= before


def test_the_async_twin_sends_the_same(coordinator: FakeCoordinator, client: Client, sender: RecordingSender) -> None:
    async def story() -> None:
        async with AsyncUpdateSession(session(client, sender)) as update:
            for name, tensor in TENSORS.items():
                await update.put(name, tensor)
            await update.seal()
            assert (await update.wait()).outcome == "committed"

    asyncio.run(story())
    assert {n: bytes(sender.bytes.get(n, b"")) for n in TENSORS} == {n: tensor_bytes(t) for n, t in TENSORS.items()}


def test_a_cancelled_step_of_the_async_twin_stops_the_sender(coordinator: FakeCoordinator, client: Client) -> None:
    sender = RecordingSender(block=1)

    async def story() -> None:
        async with AsyncUpdateSession(session(client, sender)) as update:
            for name, tensor in TENSORS.items():
                await update.put(name, tensor)

    async def cancelled() -> None:
        task = asyncio.create_task(story())
        await asyncio.to_thread(sender.blocked.wait, 30)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, LiveweightsError)):
            await task

    asyncio.run(cancelled())
    assert sender.ends == [False]
    assert verbs(coordinator) == ["abort"]
