"""Ray: replicas and coordinator are actors of a cluster of two nodes on this machine.

Cards that are numbered in two ways are in `test_device_memory`: nothing of a device goes through Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import ray
import torch

from engine_adapter.testing import fixture_config, toy_tensors
from engine_adapter.testing.fronts import PROMPT, toy_settings
from tests.integration.ray_stage import (
    HANG_S,
    STORE_BYTES,
    Fleet,
    ask,
    ask_again,
    code_of,
    ray_fleet,
    tokens,
    two_nodes,
    until,
)
from tests.standing import stand_still
from trainer_side.client.client import Client
from trainer_side.client.session import UpdateSession
from trainer_side.publishing.pusher import Pusher
from trainer_side.sources import as_source
from transports.digest import tensor_digest, to_hex
from transports.registry import make_sender
from updater.coordinator.members.participants import Unreachable
from updater.core.errors import Aborted
from updater.core.participant import StatusRequest
from updater.ray.calls import ActorTransport, Address
from updater.ray.participant import RayParticipant

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(4 * HANG_S)]

torch.set_num_threads(1)
#: What is told to an actor when it is made, and kept by Ray for its next life.
SMALL = 10_000
DEADLINE_S = 240.0  # only a hang reaches it
#: Bytes that a push says per tensor: name, shape and digest in the manifest, and once more at the seal.
WORDS = 400


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with two_nodes(), ray_fleet(tmp_path_factory.mktemp("ray"), "cases") as fleet:
        fleet.start("one", "left")
        fleet.start("two", "right")
        for replica in fleet.replicas.values():
            assert ask(replica.ready.remote())["body"]["state"] == "open"
        yield fleet


def weights(seed: int) -> dict[str, torch.Tensor]:
    return toy_tensors(fixture_config("M0"), seed)


@pytest.mark.case("B182")
def test_no_weights_cross_the_object_store(fleet: Fleet) -> None:
    """A push is carried by the transport; what goes through Ray is a manifest and words about it."""

    class Counting(ActorTransport):
        sent = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            self.sent += len(request.read())
            return super().handle_request(request)

    state = weights(8)
    counting = Counting(Address("coordinator", fleet.namespace))
    with Client("http://coordinator", "", transport=counting) as link:
        with Pusher(link=link, transport="broadcast") as pusher:
            receipt = pusher.push(state, fleet.next())
    assert receipt.outcome == "committed"
    assert receipt.proof == "digests"
    assert 0 < counting.sent < WORDS * len(state)
    assert WORDS * len(state) < sum(tensor.nbytes for tensor in state.values())


def _send(session: UpdateSession, tensors: dict[str, torch.Tensor]) -> None:
    with session as update:
        for name, tensor in tensors.items():
            update.put(name, tensor)
        update.seal()
        update.wait()


@pytest.mark.case("B187")
def test_a_live_state_dict_that_is_sent_for_its_copy_is_refused(fleet: Fleet) -> None:
    """The digests are of the copy; what arrives is what an optimiser has made of the live tensors since."""
    live, before = weights(7), fleet.client.version().version
    source = as_source({name: tensor.clone() for name, tensor in live.items()})
    digests = {name: to_hex(tensor_digest(tensor)) for name, tensor in live.items()}
    name = "model.norm.weight"
    live[name] += 1.0
    sender = make_sender("broadcast")
    session = UpdateSession(fleet.client, sender, source.specs, fleet.next(), digests=digests)
    try:
        with pytest.raises(Aborted) as caught:
            _send(session, live)
    finally:
        sender.close()
    assert (caught.value.code, caught.value.failures[0].tensor) == ("tensor_digest", name)
    assert fleet.client.version().version == before
    fleet.serves("one", fleet.paths[1], before or "")


@pytest.mark.case("B179")
def test_an_actor_that_stands_still_holds_a_call_no_longer_than_its_own_limit(fleet: Fleet) -> None:
    front = ask(fleet.replicas["two"].processes.remote())["front"]
    participant = RayParticipant("two", str(Address("two", fleet.namespace)))

    async def status(seconds: float) -> Any:
        async with asyncio.timeout(HANG_S):
            return await participant.call("status", StatusRequest(), seconds)

    stand_still(front)
    try:
        with pytest.raises(Unreachable) as silent:
            asyncio.run(status(0.5))
    finally:
        os.kill(front, signal.SIGCONT)
    assert not silent.value.refused  # it may serve: its silence proves nothing
    assert asyncio.run(status(DEADLINE_S)).replica == "two"


@pytest.mark.case("B179")
def test_an_actor_killed_in_staging_aborts_the_update_and_the_others_serve_on(fleet: Fleet) -> None:
    """Every rank waits for a sender when one actor dies: nothing but its death can end the update before the limit."""
    live, path = fleet.client.version().version or "", fleet.live_path()
    front = ask(fleet.replicas["two"].processes.remote())["front"]
    source = as_source(weights(7))
    sender = make_sender("broadcast")
    try:
        session = UpdateSession(fleet.client, sender, source.specs, fleet.next())
        session.begin()
        assert session.offered(DEADLINE_S)
        os.kill(front, signal.SIGKILL)
        assert session.ended(DEADLINE_S)
        error = code_of(session.receipt)
    finally:
        sender.close()
    assert isinstance(error, Aborted)
    # Its death is seen, or its next life says that it is not there yet, whichever is heard first.
    assert {failure.code for failure in error.failures if failure.replica == "two"} & {"replica_lost", "shut"}
    fleet.serves("one", path, live)
    # What is live came by a stream that is over: its next life has nothing to catch up from, and stays shut.
    until(lambda: _standing(fleet, "two") == "joining")
    assert ask(fleet.replicas["two"].version.remote())["body"]["state"] == "joining"
    # Until the next update brings it along, like all members.
    step = fleet.next()
    with Pusher(str(Address("coordinator", fleet.namespace)), transport="broadcast") as pusher:
        assert pusher.push(weights(7), step).outcome == "committed"
    for name in fleet.replicas:
        fleet.serves(name, fleet.paths[0], f"0-{step}")


def _standing(fleet: Fleet, replica: str) -> str:
    return next(member.state for member in fleet.client.fleet().members if member.replica == replica)


@pytest.mark.case("B181")
def test_an_actor_is_made_of_small_arguments_and_comes_back_when_the_store_was_full(fleet: Fleet) -> None:
    settings = replace(toy_settings(fleet.paths[0], replica="one"), coordinator="ray://coordinator@cases")
    assert len(ray.cloudpickle.dumps((settings, str(Address("one"))))) < SMALL
    chunk = STORE_BYTES // 4
    filled = [ray.put(np.zeros(chunk, np.uint8)) for _ in range(6)]  # more than one node keeps in memory
    path, live = fleet.other(), f"0-{fleet.next()}"
    fleet.client.update({"path": str(path), "version": live})
    os.kill(ask(fleet.replicas["one"].processes.remote())["front"], signal.SIGKILL)
    answer = ask_again(lambda: fleet.replicas["one"].generate.remote(PROMPT, 6, ignore_eos=True))["body"]
    assert (answer["liveweights"]["version"], answer["choices"][0]["token_ids"]) == (live, tokens(path))
    assert len(filled) == 6
    step, other = fleet.next(), fleet.other()
    assert fleet.client.update({"path": str(other), "version": step}).outcome == "committed"
    for name in fleet.replicas:
        fleet.serves(name, other, f"0-{step}")


@pytest.mark.case("B179")
def test_an_actor_that_is_gone_for_good_is_known_to_be_gone_at_once(fleet: Fleet) -> None:
    participant = RayParticipant("two", str(Address("two", fleet.namespace)))

    async def status() -> Any:
        async with asyncio.timeout(HANG_S):
            return await participant.call("status", StatusRequest(), DEADLINE_S)

    assert asyncio.run(status()).replica == "two"
    ray.kill(fleet.replicas.pop("two"))
    # By the handle that is known, and then by a name that no actor has.
    for _way in range(2):
        until(lambda: _known_to_be_gone(status))
    error = code_of(lambda: fleet.client.update({"path": str(fleet.other()), "version": fleet.next()}))
    assert {failure.replica for failure in error.failures} == {"two"}
    assert ask(fleet.coordinator.remove.remote("two", confirm_dead=True))["status"] == 204
    step, other = fleet.next(), fleet.other()
    assert fleet.client.update({"path": str(other), "version": step}).outcome == "committed"
    fleet.serves("one", other, f"0-{step}")


def _known_to_be_gone(status: Callable[[], Any]) -> bool:
    """Ray may need a moment to tell of a death: until then the actor answers, or cannot be reached for now."""
    try:
        asyncio.run(status())
    except Unreachable as error:
        return error.refused
    return False
