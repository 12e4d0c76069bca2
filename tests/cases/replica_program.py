"""A toy replica as a process of its own: `python replica_program.py NAME MODEL PORT COORDINATOR ROOT LOGS`.

Requests at a shut gate get their 503 almost at once instead of waiting for it to open.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from engine_adapter.replica.admission import Limits
from engine_adapter.replica.launch import run_engine
from engine_adapter.testing.fronts import toy_settings


def main() -> int:
    name, model, port, coordinator, root, logs = sys.argv[1:]
    settings = replace(
        toy_settings(Path(model)),
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
