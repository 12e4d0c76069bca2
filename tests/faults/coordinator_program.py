"""A real coordinator process for the fault tests: `python coordinator_program.py STATE ROOT PORT [WHEN]`.

`WHEN`, for example `before decided` or `after published`: the process kills itself at that record, as SIGKILL would.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from updater.coordinator.journal.journal import Journal
from updater.core.fleet.effects import Record
from updater.server.serving import serve
from updater.settings import Deadlines, Settings


class Dying(Journal):
    """Only the second update is fatal: the first one is what the fleet goes back to."""

    when = ""

    def append(self, record: Record, at: float) -> None:
        fatal = record.version.step == 8
        if fatal and self.when == f"before {record.kind.value}":
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(record, at)
        if fatal and self.when == f"after {record.kind.value}":
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    state, root, port, *when = sys.argv[1:]
    Dying.when = " ".join(when)
    # No process stands still here: one that is slow must not count as lost.
    deadlines = Deadlines(status_s=30.0, probe_every_s=0.2, retry_first_s=0.02, shutdown_s=60.0)
    serve(Settings(state=Path(state), roots=(Path(root),), port=int(port), deadlines=deadlines, new_fleet=True), Dying)


if __name__ == "__main__":
    main()
