"""A real coordinator process is killed while a trainer streams into real ranks; another life of it goes on."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from tests.cases.live_fleet import HANG_S, LiveFleet, free_port
from trainer_side import Client, Pusher, UpdateSession
from trainer_side.sources import as_source
from transports.registry import make_sender
from updater.core.errors import LiveweightsError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("coordinator_program.py")
BUCKET = 4096
Tensors = Mapping[str, torch.Tensor]


class Mortal(LiveFleet):
    """A fleet whose coordinator is a process of its own, always at the same address and with the same `state`."""

    def __init__(self, home: Path, state: Path) -> None:
        self.state = state
        super().__init__(home)

    async def _serve(self) -> None:
        self._port = free_port()
        self.start()
        await self._end.wait()
        self.kill(signal.SIGTERM)

    def start(self) -> None:
        command = [sys.executable, str(PROGRAM), str(self.state), str(self.home), str(self._port)]
        self.coordinator = subprocess.Popen(command)
        self.url = f"http://127.0.0.1:{self._port}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.coordinator.send_signal(number)
        self.coordinator.wait(HANG_S)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get(f"{self.url}/healthz").status_code == 200
        return False

    def both_open_on(self, version: str) -> bool:
        return self.members() == [("open", version)] * 2

    def members(self) -> list[tuple[str, str]]:
        return [(each["state"], each["live_version"]) for each in self.get("/v1/fleet")["members"]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("mortal")
    return make_toy_checkpoint(home / "a", seed=7), make_toy_checkpoint(home / "b", seed=8)


@pytest.fixture
def fleet(checkpoints: tuple[Path, Path], tmp_path: Path) -> Iterator[Mortal]:
    made = Mortal(checkpoints[0].parent, tmp_path / "state")
    try:
        made.until(made.answers)
        for name, tp in (("two", 2), ("one", 1)):
            made.begin(name, checkpoints[0], tp)
        for name in ("two", "one"):
            made.admitted(name)
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def streaming(fleet: Mortal, kind: str, tensors: Tensors) -> Iterator[UpdateSession]:
    source, sender = as_source(tensors), make_sender(kind)
    try:
        with (
            Client(fleet.url, "") as client,
            UpdateSession(client, sender, source.specs, 1, digests=source.digests(), bucket_bytes=BUCKET) as update,
        ):
            yield update
    finally:
        sender.close()


def first_half(update: UpdateSession, tensors: Tensors) -> list[str]:
    """Put it; what is left."""
    names = list(tensors)
    for name in names[: len(names) // 2]:
        update.put(name, tensors[name])
    return names[len(names) // 2 :]


def still_serves(fleet: Mortal, digests: Mapping[str, object]) -> None:
    for name, replica in fleet.replicas.items():
        assert fleet.complete(replica.url).status_code == 200
        assert fleet.digests(name) == digests[name]


def goes_on(fleet: Mortal, kind: str, tensors: Tensors, before: Mapping[str, object]) -> None:
    fleet.until(lambda: fleet.both_open_on(fleet.get("/v1/version")["version"]))
    still_serves(fleet, before)
    with Pusher(fleet.url, "", transport=kind, bucket_bytes=BUCKET) as pusher:
        assert pusher.push(tensors, 2).outcome == "committed"
    assert fleet.members() == [("open", "0-2")] * 2
    assert all(fleet.digests(name) != before[name] for name in fleet.replicas)


@pytest.mark.parametrize("kind", ["broadcast", "shared_memory"])
def test_another_life_of_it_ends_the_update(fleet: Mortal, checkpoints: tuple[Path, Path], kind: str) -> None:
    tensors = load_file(checkpoints[1] / "model.safetensors")
    before = {name: fleet.digests(name) for name in fleet.replicas}

    def push() -> None:
        with streaming(fleet, kind, tensors) as update:
            rest = first_half(update, tensors)
            fleet.kill()
            still_serves(fleet, before)
            fleet.start()
            fleet.until(fleet.answers)
            for name in rest:
                update.put(name, tensors[name])
            update.seal()

    with pytest.raises(LiveweightsError) as caught:
        push()
    assert caught.value.receipt is not None, caught.value
    assert caught.value.receipt["outcome"] == "aborted"
    goes_on(fleet, kind, tensors, before)
