"""What a round may not leave behind: processes, temporary files, shared memory, sockets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.faults.bad_day.fleet import RANKS, Fleet

_SHARED = Path("/dev/shm")
#: More open descriptors than a process had when it was first looked at: connections come and go, leaks only come.
_MORE = 40
#: What a stock vLLM keeps in its temporary folder while it serves, by name. Ours begins with `liveweights-`.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OF_VLLM = re.compile(r"torchinductor_.+|vllm_dist_[0-9a-f]{32}")


class Leftovers:
    """Compared with what was there when this was made, and with what the living processes of the fleet need."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shared = _names(_SHARED)
        self._first: dict[int, int] = {}  # pid -> descriptors

    def look(self, trainer: int) -> list[str]:
        """`trainer`: the process of the one that lives."""
        fleet, left = self._fleet, list[str]()
        lives = [*fleet.fronts.values(), *fleet.seconds, fleet.coordinator]
        known = {life.pid for life in lives if life is not None} | {trainer}
        found = fleet.processes()
        parents = {process.pid: _parent(process) for process in found}
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not self._descends(process.pid, parents, known) and not _nursery(process):
                    left.append(f"process {process.pid}: {' '.join(process.cmdline())[:120]}")
                opened = process.num_fds()
                if opened > self._first.setdefault(process.pid, opened) + _MORE:
                    left.append(f"process {process.pid} has {opened} open files, {self._first[process.pid]} at first")
        folder = fleet.home / "tmp"
        names = _names(folder)
        if fleet.stand.is_vllm:
            names = {name for name in names if not of_vllm(folder / name)}
        ranks = {name for name in names if name.startswith("liveweights-ranks-")}
        if len(ranks) > len(RANKS):
            left.append(f"{len(ranks)} folders of ranks for {len(RANKS)} replicas")
        left += [f"temporary: {name}" for name in sorted(names - ranks)]
        pids = {str(pid) for pid in self._first}
        shared = [name for name in _names(_SHARED) - self._shared if pids & set(name.replace("-", "_").split("_"))]
        return [*left, *(f"shared memory: {name}" for name in sorted(shared))]

    def _descends(self, pid: int, parents: Mapping[int, int], known: set[int]) -> bool:
        """Is it known, or the child of one that is? The workers of a vLLM are children of its engine process."""
        generations = 2 if self._fleet.stand.is_vllm else 1
        for _ in range(generations):
            if pid in known:
                return True
            pid = parents.get(pid, 0)
        return pid in known


def of_vllm(path: Path) -> bool:
    """Is it what vLLM makes for itself: its sockets, torch's cache of kernels, the meeting file of its ranks?"""
    if _UUID.fullmatch(path.name):
        return path.is_socket()
    return _OF_VLLM.fullmatch(path.name) is not None


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.ppid())
    return 0


def _nursery(process: psutil.Process) -> bool:
    return "trainers" in process.cmdline() and _parent(process) == psutil.Process().pid
