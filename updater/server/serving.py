"""The coordinator as a process: its socket, its life from the first signal to the last, and uvicorn around the app."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from updater.coordinator.coordinator import Coordinator
from updater.coordinator.journal.journal import Journal
from updater.coordinator.journal.state_folder import StateFolder
from updater.core.errors import Failure
from updater.server.connections import BoundedServer, listen
from updater.server.routes import create_app
from updater.settings import Settings

_log = logging.getLogger("liveweights.coordinator")


class _Server(BoundedServer):
    """uvicorn, with its end in our hands: updates end before it waits for the clients that wait for them."""

    def __init__(self, app: ASGIApp, coordinator: Coordinator) -> None:
        super().__init__(app, end_s=5, keep_alive_s=75)
        self._coordinator = coordinator

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """One signal ends the service in order, a second one at once. Neither is raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, caught = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in caught:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        winding_down = asyncio.ensure_future(self._coordinator.wind_down())
        while not winding_down.done() and not self.force_exit:
            await asyncio.wait([winding_down], timeout=0.1)
        winding_down.cancel()
        await super().shutdown(sockets)


def serve(
    settings: Settings, open_journal: Callable[[Path, str], Journal] = Journal, *, take_over: bool = False
) -> None:
    """Run a coordinator until SIGINT or SIGTERM. Raises SystemExit(1) if it had to stop by itself, OSError if the
    address is taken, and LiveweightsError if the state folder cannot be used: a living coordinator has it (unless
    `take_over`), or its journal is not for this release."""
    # Bound before the journal is touched: of two coordinators with one address, the second ends here.
    with closing(listen(settings.host, settings.port)) as listener, StateFolder.open(settings, take_over=take_over):
        stopped = asyncio.run(_serve(settings, listener, open_journal))
    if stopped is not None:
        raise SystemExit(1)


async def _serve(
    settings: Settings, listener: socket.socket, open_journal: Callable[[Path, str], Journal]
) -> Failure | None:
    """Why it stopped by itself, or None."""
    reason: list[Failure] = []
    servers: list[_Server] = []

    def on_stop(failure: Failure) -> None:
        if failure.code != "shut":
            _log.error("the coordinator stops: %s", failure.message)
        reason.append(failure)
        for server in servers:
            server.should_exit = True

    coordinator = Coordinator(settings, on_stop=on_stop, journal=open_journal(settings.state_folder, settings.fleet))
    servers.append(_Server(create_app(coordinator), coordinator))
    host, port = listener.getsockname()[:2]
    try:
        await coordinator.start()
        gc.freeze()  # no collection within a pause looks through what start left behind
        _log.info("coordinator of fleet %r on %s port %d", settings.fleet, host, port)
        if not reason:
            await servers[0].serve(sockets=[listener])
        stopped = coordinator.stopped
    finally:
        if servers[0].force_exit:
            coordinator.kill()
        await coordinator.close()
    return stopped
