"""A policy-gradient loop that publishes its weights into a running engine after every step.

    python examples/rl_loop/main.py --seed 1 --report report.json
    python examples/rl_loop/main.py --seed 1 --no-push --report control.json

Starts a coordinator, one embedded engine and a trainer of two FSDP2 processes; `trainer.py` holds the loop. The policy
is a tiny Llama over bytes with random weights; the reward is the share of lower-case letters in what it says. Every
request asks for at least the version that was published last, and every reply says which version made it. With
`--no-push` the trainer learns as well, but only the first weights are ever published: the engine's reward stays flat.
`--seed` may be given several times: the runs follow each other on the same processes, each as a run of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_adapter.models import ModelShape, make_model
from updater.demo.processes import Child, Children, free_port

HERE = Path(__file__).resolve().parent
#: Sizes of the policy. Its weights are random in every run: of this checkpoint only config and tokenizer are used.
SHAPE = ModelShape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=256)
#: What the mean reward must have gained to count: more than chance adds in millions of runs, far less than learning.
STANDARD_ERRORS = 5.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rewards of the completions in the first and the last fifth of the steps; the error is of the difference."""

    first: float
    last: float
    standard_error: float
    improved: bool


def judge(rewards: list[list[float]]) -> Verdict:
    """`rewards`: per step, of every completion."""
    fifth = max(1, len(rewards) // 5)
    first = [reward for step in rewards[:fifth] for reward in step]
    last = [reward for step in rewards[-fifth:] for reward in step]
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    gain = statistics.fmean(last) - statistics.fmean(first)
    return Verdict(statistics.fmean(first), statistics.fmean(last), error, gain > STANDARD_ERRORS * error)


def main() -> int:
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # nothing is left running
    with tempfile.TemporaryDirectory(prefix="liveweights-rl-") as name:
        work = Path(name)
        model = make_model(work / "model", SHAPE)
        children = Children(work)
        try:
            coordinator, replica = _start_fleet(children, model, work)
            ended = _train(asked, model, work, coordinator, replica)
        finally:
            for fault in children.stop():
                print(fault, file=sys.stderr)
        if ended:
            return ended
        runs = json.loads((work / "runs.json").read_text())
    verdicts = [judge([step["rewards"] for step in run["steps"]]) for run in runs]
    for run, verdict in zip(runs, verdicts, strict=True):
        print(
            f"seed {run['seed']}: mean reward {verdict.first:.3f} in the first fifth, {verdict.last:.3f} in the last,"
            f" standard error {verdict.standard_error:.4f}: {'improved' if verdict.improved else 'did not improve'}"
        )
    report = {
        "pushed": not asked.no_push,
        "transport": asked.transport,
        "runs": [run | {"verdict": asdict(verdict)} for run, verdict in zip(runs, verdicts, strict=True)],
    }
    asked.report.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, action="append", required=True, help="may be given several times")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-push", action="store_true", help="publish only the weights that the run starts with")
    parser.add_argument("--transport", default="shared_memory", choices=("disk", "broadcast", "shared_memory"))
    parser.add_argument("--report", type=Path, required=True)
    asked = parser.parse_args()
    if asked.steps < 5:
        parser.error("a fifth of the steps must be at least one")
    return asked


def _start_fleet(children: Children, model: Path, work: Path) -> tuple[Child, Child]:
    root = ["--root", str(work)]
    port = free_port()
    coordinator = children.start(
        "coordinator", ["serve", "--new-fleet", "--port", str(port), "--state", str(work / "s"), *root], port
    )
    children.wait_ready(coordinator, "/healthz")
    port = free_port()
    engine = ["engine", "--model", str(model), "--port", str(port), "--coordinator", coordinator.url, *root]
    replica = children.start("replica", [*engine, "--option", "sampling=true"], port)
    children.wait_ready(replica)
    return coordinator, replica


def _train(asked: argparse.Namespace, model: Path, work: Path, coordinator: Child, replica: Child) -> int:
    """The trainer's exit code. It writes `runs.json`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    program: list[Any] = [HERE / "trainer.py", "--model", model, "--work", work, "--steps", asked.steps]
    program += ["--coordinator", coordinator.url, "--replica", replica.url, "--transport", asked.transport]
    program += [part for seed in asked.seed for part in ("--seed", seed)]
    program += ["--no-push"] if asked.no_push else []
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    command = [*launcher, *map(str, program)]
    trainer = subprocess.Popen(command, env=os.environ | quiet)
    try:
        return trainer.wait()
    finally:
        if trainer.poll() is None:
            trainer.terminate()  # the launcher ends what it has launched
            trainer.wait(STOP_S)


if __name__ == "__main__":
    sys.exit(main())
