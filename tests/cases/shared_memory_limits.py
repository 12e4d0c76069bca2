"""Streams in a process with few descriptors, or little room: prints one JSON object."""

from __future__ import annotations

import json
import os
import resource
import socket
from typing import Any

import torch

from transports.media.memfd import SealedFile
from transports.media.sealed_memory import SealedMemoryReceiver
from transports.shared_memory import SharedMemoryHub, SharedMemorySender
from transports.stream.connection import RECEIVER_LIMIT, SENDER_LIMIT, Connection
from transports.stream.messages import Buffers, FileBuffer
from transports.testing.transfer import Transfer
from updater.core.errors import LiveweightsError


def main() -> int:
    print(json.dumps({"room": room(), "descriptors": descriptors()}))
    return 0


def outcome(update: Transfer) -> list[str]:
    errors = [update.sender_error, *(receiver.error for receiver in update.receivers)]
    return [error.code if isinstance(error, LiveweightsError) else "" for error in errors]


def descriptors() -> dict[str, Any]:
    """2,000 small tensors with `ulimit -n 256`, twenty times; then one descriptor more than there is room for."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    sender, hub = SharedMemorySender(), SharedMemoryHub()
    ends, files = set(), []
    for at in range(20):
        small = {f"t{n}": torch.full((8,), float(n + at)) for n in range(2000)}
        update = Transfer(sender, [hub], small, bucket_bytes=1 << 15).run()
        whole = all(torch.equal(update.receivers[0].arrived[name], tensor) for name, tensor in small.items())
        ends.add((*outcome(update), whole))
        files.append(len(os.listdir("/proc/self/fd")))
    sender.close()
    hub.close()
    return {"ends": sorted(ends), "files": sorted(set(files)), "full": full()}


def full() -> str:
    """A buffer's descriptor comes to a process that may open no more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    here, there = Connection(ours, SENDER_LIMIT), Connection(theirs, RECEIVER_LIMIT)
    file = SealedFile(4096)
    there.post(Buffers((FileBuffer(4096),)), (file.number,))
    spare = []
    try:
        while True:
            spare.append(os.dup(0))
    except OSError:
        pass
    try:
        medium = SealedMemoryReceiver()
        for message in here.messages():
            if isinstance(message, Buffers):
                medium.map(message, here)
    except LiveweightsError as error:
        return error.code
    finally:
        for number in spare:
            os.close(number)
    return ""


def room() -> dict[str, Any]:
    """Files may grow to 1 MiB; buckets of 4 MiB are to be staged, then such that fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"t": torch.ones(1 << 20)}
    sender, hub = SharedMemorySender(), SharedMemoryHub()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    refused = Transfer(sender, [hub], large, bucket_bytes=4 << 20, deadline_s=5.0).run()
    message = str(refused.sender_error)
    fits = Transfer(sender, [hub], large, bucket_bytes=1 << 19).run()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sender.close()
    hub.close()
    return {"refused": outcome(refused), "message": message, "fits": outcome(fits)}


if __name__ == "__main__":
    raise SystemExit(main())
