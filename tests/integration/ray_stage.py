"""A Ray cluster of two nodes on this machine, and a fleet of actors on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

from engine_adapter.ray_replica import start_replica, stop_replica
from engine_adapter.testing import ToyReference, fixture_config, make_toy_checkpoint, toy_tensors
from engine_adapter.testing.fronts import PROMPT, toy_settings
from trainer_side import Client, push
from updater.core.errors import LiveweightsError, Unavailable
from updater.protocol.answers import Receipt
from updater.ray.calls import address_of
from updater.ray_actor import start_coordinator, stop_coordinator
from updater.settings import Deadlines, Settings

HANG_S = 300.0  # only a hang reaches it
STORE_BYTES = 80 << 20
TOKENS = 6
#: No process here is lost for being slow to answer: one that dies is known by its end.
DEADLINES = Deadlines(probe_every_s=0.5, status_s=60.0, lost_after=2, retry_first_s=0.02, shutdown_s=10.0)
#: Ray's own: limits that only a hang reaches, and no death of an actor by whatever else goes on on this machine.
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default any other busy process takes nearly all of the time from an actor
    "RAY_memory_monitor_refresh_ms": "0",  # no process is killed because the machine's memory is nearly full
    "RAY_local_fs_capacity_threshold": "1",  # nor refused because its disk is
    "RAY_gcs_server_port_wait_time_s": f"{HANG_S:.0f}",
    "RAY_raylet_start_wait_time_s": "60",  # where a node has died it is waited for as long
    "RAY_worker_register_timeout_seconds": f"{HANG_S:.0f}",
    "RAY_agent_register_timeout_ms": f"{1000 * HANG_S:.0f}",
}


class Nodes:
    """The nodes of one cluster."""

    def __init__(self) -> None:
        self._cluster = Cluster()

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def add(self, resource: str) -> None:
        """One more node, with eight of `resource`. Ray itself gives a node half a minute to start and its agents a
        quarter, which no setting changes: on a busy machine it may take another try.
        """
        until(lambda: self._added(resource))

    def _added(self, resource: str) -> bool:
        wanted: dict[str, Any] = {"num_cpus": 8, "resources": {resource: 8.0}, "object_store_memory": STORE_BYTES}
        if self._cluster.head_node is None:
            # A dead node is given up after five seconds instead of fifteen.
            wanted |= {"include_dashboard": False, "_system_config": {"health_check_period_ms": 1000}}
        before = children(recursive=False)
        try:
            self._cluster.add_node(**wanted, no_monitor=True, include_log_monitor=False)  # no test reads what these say
        except Exception as error:  # as plain as Ray raises it
            logging.warning("a node did not start: %s", error)
            for process in children(recursive=False) - before:
                end_tree(process)
            return False
        return True

    def kill(self, node_id: str) -> None:
        """As if its power were cut."""
        node = next(node for node in self._cluster.list_all_nodes() if node.node_id == node_id)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Nodes with the resources `left` and `right`. On return no process of the cluster is left."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        before, nodes = children(), Nodes()
        try:
            nodes.add("left")
            nodes.add("right")
            ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            yield nodes
        finally:
            started = children() - before
            ray.shutdown()
            nodes.close()
            end = time.monotonic() + HANG_S
            while (left := [process for process in started if runs(process.pid)]) and time.monotonic() < end:
                psutil.wait_procs(left, timeout=0.1)
            for process in left:
                process.kill()
        assert left == []


@dataclass
class Fleet:
    """A coordinator and replicas as actors. Checkpoint `a` is what the replicas start on."""

    home: Path
    namespace: str
    coordinator: Any
    client: Client
    replicas: dict[str, Any] = field(default_factory=dict)
    steps: int = 0

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.home / "a", self.home / "b"

    def start(self, name: str, node: str, tp: int = 1, **options: Any) -> Any:
        wanted = toy_settings(self.paths[0], tp, replica=name, logs=self.home / "logs" / name, options=options)
        wanted = replace(wanted, roots=(self.home,))
        self.replicas[name] = start_replica(
            wanted, coordinator=self.coordinator, namespace=self.namespace, broken_s=0.5, resources={node: 1}
        )
        return self.replicas[name]

    def next(self) -> int:
        self.steps += 1
        return self.steps

    def other(self) -> Path:
        """The checkpoint that is not live."""
        a, b = self.paths
        return b if self.live_path() == a else a

    def live_path(self) -> Path:
        """By what replica `one` answers, which only one of the two can make it answer."""
        told = ask(self.replicas["one"].generate.remote(PROMPT, TOKENS, ignore_eos=True))["body"]
        return next(path for path in self.paths if told["choices"][0]["token_ids"] == tokens(path))

    def serves(self, name: str, path: Path, version: str) -> None:
        told = ask(self.replicas[name].generate.remote(PROMPT, TOKENS, ignore_eos=True))
        assert told["status"] == 200, told
        assert told["body"]["choices"][0]["token_ids"] == tokens(path)
        assert told["body"]["liveweights"]["version"] == version

    def ended(self, update: str) -> Receipt:
        """Its receipt, however it ended and whichever coordinator there is by then."""
        receipts: list[Receipt] = []

        def told() -> bool:
            try:
                receipts.extend(filter(None, [self.client.status(update).receipt]))
            except Unavailable:  # who coordinates next is still starting, for longer than a client waits
                return False
            return bool(receipts)

        until(told)
        return receipts[0]

    def manual(self, path: Path) -> str:
        """The id of an update that waits for its commit, also where that comes late."""
        policy = {"commit": "manual"}
        body = {"path": str(path), "version": self.next(), "policy": policy, "lease_s": HANG_S}
        return str(self.client.begin(body).id)

    def phase(self, update: str, phase: str) -> None:
        until(lambda: self.client.status(update).phase == phase)

    def open(self) -> None:
        """Until the coordinator knows that all members serve: a front opens before its word of that has come back."""
        until(lambda: {member.state for member in self.client.fleet().members} == {"open"})


@contextmanager
def ray_fleet(home: Path, namespace: str) -> Iterator[Fleet]:
    make_toy_checkpoint(home / "a", seed=7)
    make_toy_checkpoint(home / "b", seed=8)
    settings = Settings(state=home / "state", roots=(home,), deadlines=DEADLINES, new_fleet=True)
    coordinator = start_coordinator(settings, namespace=namespace)
    fleet = Fleet(home, namespace, coordinator, Client(str(address_of(coordinator))))
    try:
        yield fleet
    finally:
        fleet.client.close()
        for replica in fleet.replicas.values():
            stop_replica(replica, HANG_S)
        stop_coordinator(coordinator, HANG_S)


class Trainer:
    """An actor that has weights and the coordinator's handle."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._client = Client(str(address_of(coordinator)))

    def push(self, seed: int, step: int, **options: Any) -> dict[str, Any]:
        weights = toy_tensors(fixture_config("M0"), seed)
        return push(weights, step, url=str(address_of(self._coordinator)), **options).model_dump(mode="json")

    def rollback(self) -> dict[str, Any]:
        return self._client.rollback().model_dump(mode="json")


@cache
def tokens(path: Path) -> list[int]:
    return list(ToyReference.load(path).generate(PROMPT, TOKENS))


def ask(reference: Any) -> Any:
    return ray.get(reference, timeout=HANG_S)


def ask_again(call: Callable[[], Any]) -> Mapping[str, Any]:
    """The first success of an actor that restarts meanwhile."""
    answers: list[Any] = []

    def answered() -> bool:
        try:
            answers.append(ask(call()))
        except RayActorError:
            return False
        return bool(answers[-1]["status"] == 200)

    until(answered)
    success: Mapping[str, Any] = answers[-1]
    return success


def children(recursive: bool = True) -> set[psutil.Process]:
    """Of this process, and theirs."""
    return set(psutil.Process().children(recursive=recursive))


def end_tree(process: psutil.Process) -> None:
    """With everything that it started."""
    tree = [process]
    with suppress(psutil.NoSuchProcess):
        tree += process.children(recursive=True)
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(tree, timeout=HANG_S)


def runs(pid: int) -> bool:
    """Whether it has not ended. One that is not collected yet has: not every machine's first process collects."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pids: Iterable[int]) -> bool:
    """Whether all of these have ended."""
    return not any(runs(pid) for pid in pids)


def until(reached: Callable[[], bool]) -> None:
    """Asked again and again: each question is a round trip. Raises AssertionError for a hang."""
    end = time.monotonic() + HANG_S
    while not reached():
        assert time.monotonic() < end, "hangs"


def code_of(call: Callable[[], Any]) -> LiveweightsError:
    """The typed error that this must end in."""
    try:
        answer = call()
    except LiveweightsError as error:
        return error
    raise AssertionError(f"not refused: {answer}")
