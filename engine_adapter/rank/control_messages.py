"""What a front tells its ranks beside the transaction: build, serve, label, submit, stop; and what ranks send unasked.

These go over the same channel as `messages` and are answered in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.base import EngineSpec, GenerateRequest, TokenEvent
from engine_adapter.rank.messages import RANK_MESSAGES, Hello, RankDone


@dataclass(frozen=True, slots=True)
class Build:
    """The first call to a rank: make the engine with `factory` (`package.module:function`) and load the model."""

    factory: str
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class StartServing:
    """The placement was admitted: label the live bytes and let the engine run. Once."""

    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Label:
    """Relabel equal bytes, while paused: a joiner whose live digest is the fleet's opens under the fleet's version."""

    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class CancelStaging:
    """Stop a running plan, stage or verify of `serial` soon. Handled at once, beside the staging thread."""

    serial: int


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Stop and exit with status 0."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Event: new tokens, in order per request."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """Event: `done` bytes of what update `serial` has to bring to this rank are read."""

    serial: int
    done: int


#: Exit status of a rank whose engine said that it failed.
ENGINE_FAILED = 71

#: verb -> (request type, reply type)
CONTROL_MESSAGES: dict[str, tuple[type, type]] = {
    "build": (Build, Hello),
    "start": (StartServing, RankDone),
    "label": (Label, RankDone),
    "submit": (GenerateRequest, RankDone),
    "cancel_request": (CancelRequest, RankDone),
    "cancel_staging": (CancelStaging, RankDone),
    "stop": (StopEngine, RankDone),
}

#: Everything that goes from front to rank.
CALLS: dict[str, tuple[type, type]] = CONTROL_MESSAGES | RANK_MESSAGES
