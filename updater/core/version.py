"""A version of the weights: (run, step), owned by the trainer, ordered lexicographically."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(r"(0|[1-9][0-9]{0,17})-(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """`run` >= 0 and `step` >= -1. A trainer that resumes from an older checkpoint opens the next run."""

    run: int
    step: int

    def __post_init__(self) -> None:
        if self.run < 0 or self.step < -1 or (self.step == -1 and self.run != 0):
            raise ValueError(f"not a version: run {self.run}, step {self.step}")

    def __str__(self) -> str:
        """`run-step`, or `start` for the checkpoint an engine was started on."""
        return "start" if self == START else f"{self.run}-{self.step}"

    @classmethod
    def parse(cls, label: str) -> Version:
        """The inverse of `str`. Raises ValueError for anything else."""
        if label == "start":
            return START
        match = _LABEL.fullmatch(label)
        if match is None:
            raise ValueError(f"not a version label: {label!r} (wanted 'run-step', for example '0-7')")
        return cls(int(match[1]), int(match[2]))


START = Version(0, -1)
