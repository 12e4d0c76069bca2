"""`python -m tests.faults.bad_day --seed N --rounds M --engine toy|embedded`: rounds by hand."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.bad_day.actions import ACTIONS
from tests.faults.bad_day.engines import make_stand
from tests.faults.bad_day.rounds import running_driver


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.bad_day", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones count on")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engine", choices=("toy", "embedded"), default="toy")
    parser.add_argument("--longest", type=float, default=4.0, help="seconds that a bad thing lasts at most")
    parser.add_argument("--action", action="append", choices=sorted(ACTIONS), help="only these; repeatable")
    parser.add_argument("--keep", action="store_true", help="leave the fleet's folder, and stop at the first fault")
    told = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="bad-day-"))
    failed, began = 0, time.monotonic()
    try:
        stand = make_stand(told.engine, home / "models")
        with running_driver(home, stand, told.action or tuple(ACTIONS), told.longest) as driver:
            print(f"the fleet serves after {time.monotonic() - began:.1f} s; {home}", flush=True)
            for seed in range(told.seed, told.seed + told.rounds):
                report = driver.play(seed)
                print(report, flush=True)
                if report.verdict.faults:
                    failed += 1
                    print("\n".join(f"      {line}" for line in report.log), flush=True)
                    if told.keep:
                        break
    finally:
        if not told.keep:
            shutil.rmtree(home, ignore_errors=True)
    print(
        f"{failed} of {told.rounds} rounds failed; {time.monotonic() - began:.0f} s; turned away: "
        f"{dict(driver.load.turned_away)}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
