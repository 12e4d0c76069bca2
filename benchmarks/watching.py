"""What processes hold: memory, file descriptors, threads, shared memory. Linux's own figures, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process. `resident`: bytes of anonymous and shared pages; `mapped_files`: bytes of others, which belong to
    the system. `memfds`: mappings of anonymous shared files, which stay after their descriptors are closed.
    """

    resident: int
    mapped_files: int
    descriptors: int
    threads: int
    memfds: int

    @property
    def counts(self) -> tuple[int, int, int]:
        return (self.descriptors, self.threads, self.memfds)


def held(pid: int | str) -> Held:
    """Raises FileNotFoundError for a process that has ended."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    anonymous, shared, mapped = (int(status[f"Rss{kind}"].split()[0]) << 10 for kind in ("Anon", "Shmem", "File"))
    memfds = sum("/memfd:" in line for line in (proc / "maps").read_text().splitlines())
    return Held(anonymous + shared, mapped, len(os.listdir(proc / "fd")), int(status["Threads"]), memfds)


def descriptors(pid: int) -> list[str]:
    """What the file descriptors of a process point to, for a message that says what leaked."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:  # the one of the listing itself
            continue
    return sorted(found)


def peak_bytes(pid: int | str) -> int:
    """The most that was resident since the start or since `5` was written to clear_refs; mapped files included."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


@dataclass(frozen=True, slots=True)
class Sample:
    """After one update. `files`: in the folder that holds the temporary files of all; `shm`: in /dev/shm."""

    update: int
    processes: Mapping[str, Held]
    files: int
    shm: int

    def least(self, other: Sample) -> Sample:
        """The smaller of each figure."""
        processes = {
            role: Held(*(min(pair) for pair in zip(astuple(mine), astuple(other.processes[role]), strict=True)))
            for role, mine in self.processes.items()
        }
        return Sample(other.update, processes, min(self.files, other.files), min(self.shm, other.shm))


def sample(update: int, pids: Mapping[str, int], folder: Path) -> Sample:
    files = sum(len(names) + len(folders) for _path, folders, names in os.walk(folder))
    shm = len(os.listdir("/dev/shm"))
    return Sample(update, {role: held(pid) for role, pid in pids.items()}, files, shm)
