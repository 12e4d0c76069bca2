"""A logits processor of vLLM's (`--logits-processors`) that changes no logit, and makes steps slow while a file exists:
what is asked for then is in flight for as long as a test needs it, on any machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

#: Names the file.
SLOW = "LIVEWEIGHTS_TEST_SLOW_STEPS"
ARGUMENTS = ("--logits-processors", f"{__name__}:SlowSteps")
#: What oneDNN may use (the Makefile's).
KERNELS = "ONEDNN_MAX_CPU_ISA"
STEP_S = 0.03


def kernels_of(slow: Path) -> Path:
    """The file that holds what a worker was told of the kernels that it may use. (No other code can read it there: a
    process that gives itself a name overwrites its environment.)"""
    return slow.with_suffix(".kernels")


class SlowSteps(LogitsProcessor):
    def __init__(self, *_config: Any) -> None:
        self._file = Path(os.environ[SLOW])
        kernels_of(self._file).write_text(os.environ.get(KERNELS, ""))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._file.exists():
            time.sleep(STEP_S)
        return logits

    def is_argmax_invariant(self) -> bool:
        return False  # else it is not called for greedy requests

    def update_state(self, batch_update: Any) -> None:
        pass
