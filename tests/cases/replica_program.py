"""A toy replica as a process of its own: `python replica_program.py NAME MODEL PORT COORDINATOR ROOT LOGS`.

Requests at a shut gate get their 503 almost at once instead of waiting for it to open. A front needs no torch, and
without it starts in a quarter of the time: nothing of `engine_adapter.testing` is imported here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine_adapter.replica.admission import Limits
from engine_adapter.replica.launch import ENGINES, FrontSettings, run_engine


def main() -> int:
    name, model, port, coordinator, root, logs = sys.argv[1:]
    settings = FrontSettings(
        model=Path(model),
        factory=ENGINES["toy"],
        port=int(port),
        coordinator=coordinator,
        replica=name,
        roots=(Path(root),),
        limits=Limits(wait_s=0.01),
        logs=Path(logs),
    )
    return run_engine(settings)


if __name__ == "__main__":
    sys.exit(main())
