"""`python -m tests.faults.bad_day --seed N --rounds M --engine toy|embedded|vllm`: rounds by hand."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tests.faults.bad_day.catalogue import NAMES, QUICK
from tests.faults.bad_day.engines import make_stand
from tests.faults.bad_day.results import Run, record
from tests.faults.bad_day.rounds import running_driver
from updater.core.release import RELEASE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.bad_day", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones count on")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engine", choices=("toy", "embedded", "vllm"), default="toy")
    parser.add_argument("--longest", type=float, default=4.0, help="seconds that a bad thing lasts at most")
    parser.add_argument("--action", action="append", choices=sorted(NAMES), help="only these; repeatable")
    parser.add_argument("--all", action="store_true", help="on vLLM also what ends one of its processes")
    parser.add_argument("--record", action="store_true", help="add the numbers to docs/reliability.md")
    parser.add_argument("--keep", action="store_true", help="leave the fleet's folder, and stop at the first fault")
    told = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="bad-day-"))
    failed, began = 0, time.monotonic()
    names = tuple(told.action or (QUICK if told.engine == "vllm" and not told.all else NAMES))
    run = Run(told.engine, RELEASE, date.today().isoformat(), told.seed)
    try:
        stand = make_stand(told.engine, home / "models")
        with running_driver(home, stand, names, told.longest) as driver:
            print(f"the fleet serves after {time.monotonic() - began:.1f} s; {home}", flush=True)
            for seed in range(told.seed, told.seed + told.rounds):
                report = driver.play(seed)
                run.add(report)
                print(report, flush=True)
                if report.verdict.faults:
                    failed += 1
                    print("\n".join(f"      {line}" for line in report.log), flush=True)
                    if told.keep:
                        break
    finally:
        if not told.keep:
            shutil.rmtree(home, ignore_errors=True)
    if told.record:
        record(run)
    print(
        f"{failed} of {told.rounds} rounds failed; {time.monotonic() - began:.0f} s; turned away: "
        f"{dict(driver.load.turned_away)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
