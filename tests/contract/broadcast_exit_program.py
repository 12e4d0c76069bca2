"""Processes that end while groups of theirs are in use. Prints as JSON with which status each of them ended.

`python broadcast_exit_program.py STORY TIMES FOLDER`. They are forked from here, where everything has been imported,
and end as any program does: by the end of the main thread.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from transports.media.gloo import GlooGroup
from transports.media.group_init import GroupInit
from transports.media.work import nothing
from transports.stream import guards as atexit_guard

#: What a peer lives in, and what it takes more than the kernel holds between two processes.
LARGE = 16 << 20
#: A hang, not a wait: longer than any test.
LIMIT_S = 3600.0

kept: list[Any] = []  # until the interpreter ends


class SlowEnd:
    """What gives other threads time while the interpreter is finalised."""

    wait = staticmethod(time.sleep)  # the names of modules are gone by then

    def __del__(self) -> None:
        self.wait(0.3)


def busy() -> None:
    """As on a busy machine: a thread that asks for the interpreter waits until another gives it away, which it does at
    the end at last.
    """
    sys.setswitchinterval(LIMIT_S)
    kept.append(SlowEnd())


def join(store: Any, rank: int) -> GlooGroup:
    return GlooGroup(store, rank, 2, "127.0.0.1", LIMIT_S)


def both_ends() -> list[GlooGroup]:
    store = dist.HashStore()
    groups: list[GlooGroup] = []
    threads = [threading.Thread(target=lambda rank=rank: groups.append(join(store, rank))) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.extend(groups)
    busy()
    for group in groups:
        group.broadcast(torch.zeros(1 << 20, dtype=torch.uint8), nothing)
    return groups


def posted(_peer: int, _meet: Path) -> None:
    """A bucket is on its way."""
    both_ends()


def closed(_peer: int, _meet: Path) -> None:
    """As well, and the groups are being let go of."""
    for group in both_ends():
        group.close()


def posted_to_peer(meet: Path) -> None:
    kept.append(join(dist.FileStore(str(meet), 2), 0))
    kept[0].broadcast(torch.zeros(LARGE, dtype=torch.uint8), nothing)


def deserted(peer: int, meet: Path) -> None:
    """A bucket is on its way to a peer that dies just now."""
    posted_to_peer(meet)
    busy()
    atexit.register(os.kill, peer, signal.SIGKILL)


def forming(_peer: int, _meet: Path) -> None:
    """A group is about to form, and what it waits for comes just now: another rank that cannot be reached."""
    forming = GroupInit(lambda relay: join(relay, 0), nothing)
    while not forming.outgoing():  # its own address is the first thing that it says
        threading.Event().wait(0.001)
    kept.append(forming)
    busy()
    atexit.register(forming.relay.learn, "0/1", b"")


def frozen(_peer: int, meet: Path) -> None:
    """A bucket is on its way to a peer that does not take it."""
    posted_to_peer(meet)


STORIES: dict[str, Callable[[int, Path], None]] = {
    story.__name__: story for story in (posted, closed, deserted, forming, frozen)
}
WITH_PEER = ("deserted", "frozen")


def end_a_peer(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def tell(story: str, meet: Path) -> int | None:
    """The status with which one process ended; None in that process."""
    peer = 0
    if story in WITH_PEER:
        peer = os.fork()
        if not peer:
            kept.append(join(dist.FileStore(str(meet), 2), 1))
            while True:
                signal.pause()
    process = os.fork()
    if not process:
        if story != "frozen":
            atexit_guard.EXIT_S = LIMIT_S  # what it waits for comes, however busy the machine is
        STORIES[story](peer, meet)
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if peer:
        end_a_peer(peer)
    return status


def main(story: str, times: int, folder: Path) -> None:
    torch.set_num_threads(1)
    statuses = []
    for turn in range(times):
        status = tell(story, folder / str(turn))
        if status is None:
            return
        statuses.append(status)
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
