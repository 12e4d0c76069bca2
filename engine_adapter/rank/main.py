"""The process of one rank: `python -m engine_adapter.rank.main --fd N`, started by `ranks.RankPool` only.

Four threads: the main one reads the channel and runs control verbs, one at low priority runs everything that may
take long while the engine serves (`STAGING_VERBS`), the engine's own one emits tokens, one looks whether it failed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time

from engine_adapter.base import EngineFactory, RankEngine
from engine_adapter.rank.channel import ENGINE_FAILED, Build, RankChannel, StartServing
from engine_adapter.rank.host import RankHost
from updater.core.errors import Failure, LiveweightsError

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.25  # how long a failed engine may go unnoticed


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its front dies; leave at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def load_factory(name: str) -> EngineFactory:
    """`package.module:function`. Raises LiveweightsError if there is no such thing."""
    module_name, _, function = name.partition(":")
    try:
        factory: EngineFactory = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise LiveweightsError(Failure("bad_request", f"no engine factory {name!r}: {error}")) from None
    return factory


class RankProcess(RankHost[RankEngine]):
    """One life of one rank."""

    def make_engine(self, request: Build) -> RankEngine:
        return load_factory(request.factory)(request.spec)

    def start(self, request: StartServing) -> None:
        super().start(request)
        # Libraries and model leave several hundred thousand objects: looking through them once takes longer than ten
        # pauses, and they stay for good.
        gc.collect()
        gc.freeze()
        threading.Thread(target=self._watch, args=(self.engine,), name="watch", daemon=True).start()

    def _watch(self, engine: RankEngine) -> None:
        """An engine that failed inside a process that lives would fail every request for ever: let the front learn of
        it from the kernel, like of any other death.
        """
        while not self.server.stopping:
            failure = engine.failure
            if failure is not None and not self.server.stopping:
                print(f"the engine failed: {failure}", file=sys.stderr, flush=True)
                os._exit(ENGINE_FAILED)
            time.sleep(_WATCH_S)


def main(arguments: list[str] | None = None) -> None:
    """Never returns: threads of the engine or of torch must not keep a rank alive whose front has gone."""
    parser = argparse.ArgumentParser(prog="engine_adapter.rank.main")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    started = time.monotonic()
    RankProcess(RankChannel(socket.socket(fileno=options.fd))).server.run()
    print(f"rank process ends after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
