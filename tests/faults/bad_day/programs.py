"""The processes of a bad day: `python -m tests.faults.bad_day.programs KIND JSON`.

The shipped coordinator, front and pusher, with deadlines of seconds so that a round is short, and with addresses that
lead through the driver's relays.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_adapter.rank.main import die_with_parent

#: Leases and deadlines of the fleet, in seconds. SIGSTOP lasts at most 4 s in `make test`.
LEASE_S, VERB_S, WATCH_S = 2.0, 5.0, 0.5


def coordinator(told: Mapping[str, Any]) -> None:
    import logging

    from updater.server.serving import serve
    from updater.settings import Deadlines, Settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    slower = float(told["slower"])
    verb_s = VERB_S * slower
    deadlines = Deadlines(
        plan_s=verb_s,
        install_s=verb_s,
        invalidate_s=verb_s,
        restore_s=verb_s,
        resume_s=verb_s,
        discard_s=1.0 * slower,  # what a dead replica costs every round
        join_s=verb_s,
        shutdown_s=verb_s,
        status_s=1.0 * slower,
        probe_every_s=0.3,
        watch_s=WATCH_S,
        lost_after=3,
        update_lease_s=LEASE_S * slower,
    )
    roots = tuple(Path(root) for root in told["roots"])
    settings = Settings(state=Path(told["state"]), port=told["port"], roots=roots, deadlines=deadlines)
    serve(settings, take_over=bool(told.get("take_over")))


def front(told: Mapping[str, Any]) -> None:
    import logging

    from engine_adapter.replica.admission import Limits
    from engine_adapter.replica.interfaces import WorkDeadlines
    from engine_adapter.replica.launch import ENGINES, FrontSettings, Replica

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    class Announced(Replica):
        """The coordinator reaches it through a relay."""

        @property
        def url(self) -> str:
            return str(told["announced"])

    settings = FrontSettings(
        model=Path(told["model"]),
        tp=told["tp"],
        port=told["port"],
        coordinator=told["coordinator"],
        replica=told["replica"],
        roots=tuple(Path(root) for root in told["roots"]),
        factory=ENGINES[told["engine"]],
        options=told["options"],
        limits=Limits(wait_s=10.0),
        deadlines=WorkDeadlines(plan_s=VERB_S, commit_s=VERB_S, discard_s=VERB_S),
        stop_s=3.0,
        watch_s=WATCH_S,
    )

    async def run() -> int:
        replica, stop = Announced(settings), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        return await replica.run(stop)

    raise SystemExit(asyncio.run(run()))


def trainers(told: Mapping[str, Any]) -> None:
    """Imports what a trainer needs, then forks one for every connection to `address`: a new one costs nothing."""
    import torch

    for name in ("trainer_side.publishing.pusher", "transports.broadcast", "transports.shared_memory"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(told["address"])
        listener.listen()
        while True:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                os.setsid()
                die_with_parent(os.getppid())
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                trainer(connection, told)
                os._exit(0)
            connection.close()


def trainer(connection: socket.socket, told: Mapping[str, Any]) -> None:
    """One trainer: takes commands as lines of JSON, one at a time, and answers each with a line of JSON."""
    from trainer_side.client.client import Client
    from trainer_side.publishing.pusher import Pusher
    from updater.core.errors import LiveweightsError

    port = told["sender_port"]
    sender = {"host": "127.0.0.1", "port": port, "advertise": told["advertise"]} if port else {}
    made: dict[str, Pusher] = {}

    def pusher(transport: str) -> Pusher:
        if transport not in made:
            options = {"sender_options": sender} if transport == "broadcast" else {}
            size = told["bucket_bytes"]
            made[transport] = Pusher(told["coordinator"], "", transport=transport, bucket_bytes=size, **options)
        return made[transport]

    def perform(command: Mapping[str, Any]) -> Any:
        if command["transport"] == "rollback":
            with Client(told["coordinator"], "") as client:
                return client.rollback(id=command["id"], policy=command["policy"], timeout_s=60.0)
        pace_s = command["pace_s"]
        return pusher(command["transport"]).push(
            command["path"] if command["transport"] == "disk" else weights(command["path"]),
            command["version"],
            id=command["id"],
            policy=command["policy"],
            lease_s=command["lease_s"],
            timeout_s=60.0,
            progress=lambda _bytes: time.sleep(pace_s),
        )

    with connection, connection.makefile("rw") as line:
        line.write(json.dumps({"pid": os.getpid()}) + "\n")
        line.flush()
        for text in line:
            try:
                answer: dict[str, Any] = {"receipt": perform(json.loads(text)).model_dump(mode="json")}
            except LiveweightsError as error:
                codes = [failure.code for failure in error.failures]
                answer = {"error": str(error), "codes": codes, "receipt": error.receipt, "retryable": error.retryable}
            line.write(json.dumps(answer) + "\n")
            line.flush()


def weights(path: str) -> Any:
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")


def main() -> None:
    kind, text = sys.argv[1:]
    die_with_parent(os.getppid())
    {"coordinator": coordinator, "front": front, "trainers": trainers}[kind](json.loads(text))


if __name__ == "__main__":
    main()
