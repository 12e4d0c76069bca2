"""Why a client gives an update up: what it may say, what it says by itself, and what the coordinator makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from trainer_side import AsyncClient, Client, UpdateSession
from trainer_side.client import causes
from trainer_side.testing import FakeCoordinator, RecordingSender
from updater.core.errors import CODES, Aborted, Failure, Rejected, Unavailable
from updater.core.fleet.flow import CLIENT_REASONS
from updater.core.fleet.table import TIME_CODES
from updater.protocol.api import CAUSES, MAX_CAUSES, MAX_TEXT, PEER_CAUSES
from updater.protocol.manifest import TensorSpec
from updater.server.routes import create_app
from updater.testing.fronts import settle
from updater.testing.service import LocalService

pytestmark = pytest.mark.slow  # together, not each

STEPPED = Failure("source_changed", "written to", rank=1, tensor="w")
STALLED = Failure("peer_timeout", "did not take bucket 2", replica="one", rank=0)
Scenario = Callable[[LocalService, AsyncClient], Awaitable[None]]

# -- at the coordinator


def run(folder: Path, scenario: Scenario) -> None:
    """With a member that holds every update in its staging."""

    async def main() -> None:
        async with LocalService(folder) as service:
            (front,) = await service.join("one")
            front.hold["stage"] = asyncio.Event()
            app = httpx.ASGITransport(create_app(service.coordinator), raise_app_exceptions=False)
            client = AsyncClient("http://127.0.0.1", "", transport=app)
            try:
                await scenario(service, client)
            finally:
                front.hold["stage"].set()
                await client.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_the_cause_is_in_the_answer_the_receipt_the_events_and_the_metrics(tmp_path: Path) -> None:
    async def scenario(service: LocalService, client: AsyncClient) -> None:
        pushed = asyncio.create_task(service.push(7))
        await settle()
        await client.abort("0-7", [STEPPED, STALLED])
        document = (await pushed).json()
        assert (document["code"], document["status"], document["outcome"]) == ("source_changed", 422, "aborted")
        state = await client.status("0-7")
        assert state.receipt is not None
        assert (state.receipt.outcome, state.receipt.reason) == ("aborted", "source_changed")
        assert state.receipt.failures[:2] == [STEPPED, STALLED]
        assert [failure.code for failure in state.receipt.failures[2:]] == ["client_abort"]
        told = {name: data async for name, data in client.events("0-7")}
        assert told["receipt"] == state.receipt.model_dump(mode="json")
        assert (await client.history())[0] == state.receipt
        metrics = (await service.get("/metrics")).text
        assert 'liveweights_updates_total{kind="update",outcome="aborted",reason="source_changed"} 1.0' in metrics

    run(tmp_path, scenario)


@pytest.mark.parametrize("body", [None, {}, {"failures": []}])
def test_a_client_that_gives_no_reason_aborts_as_ever(tmp_path: Path, body: Any) -> None:
    async def scenario(service: LocalService, client: AsyncClient) -> None:
        await service.begin(7)
        assert (await service.post("/v1/updates/0-7/abort", body)).status_code == 202
        await settle()
        receipt = (await client.status("0-7")).receipt
        assert receipt is not None
        assert (receipt.reason, [failure.code for failure in receipt.failures]) == ("client_abort", ["client_abort"])

    run(tmp_path, scenario)


UNFIT: dict[str, Mapping[str, Any]] = {
    "a code that is none": {"code": "whatever"},
    "an empty code": {"code": ""},
    "no code": {"message": "why"},
    "a long message": {"code": "rank_failed", "message": "x" * (MAX_TEXT + 1)},
    "a long name": {"code": "rank_failed", "tensor": "x" * (MAX_TEXT + 1)},
    "a rank below zero": {"code": "rank_failed", "rank": -1},
    "a rank as text": {"code": "rank_failed", "rank": "1"},
    "an unknown field": {"code": "rank_failed", "outcome": "committed"},
    "a replica's own failure": {"code": "rank_failed", "replica": "one"},
    "a replica that takes no part": {"code": "peer_lost", "replica": "two"},
    "no replica's name": {"code": "peer_lost", "replica": ""},
    **{code: {"code": code} for code in set(CODES) - CAUSES},
}


def test_what_a_client_has_no_right_to_say_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario(service: LocalService, client: AsyncClient) -> None:
        await service.begin(7)
        for what, cause in UNFIT.items():
            answer = await service.post("/v1/updates/0-7/abort", {"failures": [{"code": "source_changed"}, cause]})
            assert (answer.status_code, answer.json()["code"]) == (400, "bad_request"), what
        state = await client.status("0-7")
        assert (state.phase, state.receipt) == ("staging", None)

    run(tmp_path, scenario)


def test_more_than_a_page_of_causes_is_refused(tmp_path: Path) -> None:
    async def scenario(service: LocalService, client: AsyncClient) -> None:
        await service.begin(7)
        with pytest.raises(Rejected) as caught:
            await client.abort("0-7", [STEPPED] * (MAX_CAUSES + 1))
        assert caught.value.code == "bad_request"
        await client.abort("0-7", [STEPPED] * MAX_CAUSES)

    run(tmp_path, scenario)


def test_nothing_that_the_machine_decides_by_can_be_claimed() -> None:
    assert CAUSES <= set(CODES)
    assert PEER_CAUSES <= CAUSES
    assert not CAUSES & (CLIENT_REASONS | TIME_CODES)
    # A release is what a receiver is, not what it refused or how it failed.
    assert {code for code in CAUSES if CODES[code] not in (422, 424)} == {"release_mismatch"}


# -- at the trainer


def test_only_what_is_the_trainers_to_tell_is_told() -> None:
    replicas = Failure("rank_died", "gone", replica="one", rank=1)
    wanted = Failure("client_abort", "enough")
    other = Failure("tensor_digest", "not what was promised", replica="one")
    assert causes.claimable([replicas, STEPPED, wanted, STALLED, other, STEPPED]) == (STEPPED, STALLED)
    assert len(causes.claimable(Failure("tensor_missing", "", tensor=str(at)) for at in range(100))) == MAX_CAUSES
    long = Failure("read_failed", "m" * 1000, tensor="t" * 1000, file="/" + "f" * 1000 + "/end")
    (short,) = causes.claimable([long])
    assert (len(short.message), len(short.tensor), len(short.file)) == (MAX_TEXT,) * 3
    assert short.file.endswith("/end")


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as running:
        yield running


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[Client]:
    with Client(coordinator.url, "") as made:
        yield made


TENSORS = {name: torch.arange(300, dtype=torch.float32) for name in ("a", "b")}


def session(client: Client, sender: RecordingSender) -> UpdateSession:
    specs = {name: TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    return UpdateSession(client, sender, specs, 7, bucket_bytes=1024)


@contextmanager
def begun(client: Client) -> Iterator[UpdateSession]:
    """A session whose stream is under way."""
    update = session(client, RecordingSender())
    update.begin()
    assert update.offered(60)
    try:
        yield update
    finally:
        update.leave()


def told(coordinator: FakeCoordinator) -> list[Any]:
    """The bodies of aborts."""
    posted = [path for path in coordinator.paths if not path.endswith("/events")]
    posted = [path for path in posted if path.rpartition("/")[2] in ("updates", "renew", "seal", "commit", "abort")]
    return [body for path, body in zip(posted, coordinator.bodies, strict=True) if path.endswith("/abort")]


def test_a_cause_reaches_the_coordinator_and_comes_back_once(coordinator: FakeCoordinator, client: Client) -> None:
    long = Failure("source_changed", "x" * 1000, rank=1, tensor="w")
    with begun(client) as update:
        error = update.abort(Aborted(long))
    ((failure,),) = [body["failures"] for body in told(coordinator)]
    assert failure == {"code": "source_changed", "message": "x" * MAX_TEXT, "rank": 1, "tensor": "w"}
    assert error.failures[0] == long
    assert [failure.code for failure in error.failures] == ["source_changed", "client_abort"]
    assert error.receipt is not None
    assert error.receipt["reason"] == "source_changed"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Aborted(STEPPED), [("source_changed", "w")]),
        (KeyError("w"), [("rank_failed", "")]),
        (Unavailable(Failure("unreachable", "nobody")), []),
        (KeyboardInterrupt(), []),
    ],
)
def test_a_block_that_is_left_says_what_by(
    coordinator: FakeCoordinator, client: Client, error: BaseException, expected: list[tuple[str, str]]
) -> None:
    with pytest.raises(type(error)) as caught, session(client, RecordingSender()):
        raise error
    assert caught.value is error
    (body,) = told(coordinator)
    assert [(each["code"], each.get("tensor", "")) for each in body.get("failures", [])] == expected


def test_what_the_transport_saw_of_a_replica_is_told(coordinator: FakeCoordinator, client: Client) -> None:
    sender = RecordingSender(fail=(0, Aborted(STALLED, Failure("peer_lost", "gone", replica="one", rank=1))))
    with pytest.raises(Aborted) as caught, session(client, sender) as update:
        update.put("a", TENSORS["a"])
    (body,) = told(coordinator)
    assert [(each["code"], each["replica"], each["rank"]) for each in body["failures"]] == [
        ("peer_timeout", "one", 0),
        ("peer_lost", "one", 1),
    ]
    assert [failure.code for failure in caught.value.failures] == ["peer_timeout", "peer_lost", "client_abort"]


def test_a_coordinator_that_takes_no_such_cause_is_asked_without_it(
    coordinator: FakeCoordinator, client: Client
) -> None:
    """Of another release: the end of the update matters more than its reason."""

    def answer() -> tuple[int, dict[str, Any]] | None:
        refused = {"outcome": "rejected", "failures": [{"code": "bad_request", "message": "no such code"}]}
        return (400, refused) if coordinator.bodies[-1] else None

    coordinator.answers["abort"] = answer
    with begun(client) as update:
        error = update.abort(Aborted(STEPPED))
    assert [bool(body) for body in told(coordinator)] == [True, False]
    assert [failure.code for failure in error.failures] == ["source_changed", "client_abort"]
    assert coordinator.state["receipt"]["reason"] == "client_abort"


def test_an_end_that_comes_first_is_not_blamed_on_the_trainer(coordinator: FakeCoordinator, client: Client) -> None:
    """The session's own cause comes after what the coordinator ended it for."""
    with begun(client) as update:
        coordinator.end("aborted", "superseded")
        error = update.abort(Aborted(STEPPED))
    assert [failure.code for failure in error.failures] == ["superseded", "source_changed"]
