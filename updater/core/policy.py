"""What a client may choose for one update, and which choices exclude each other.

What is not supported is refused, never downgraded: the fleet-wide rules live here, each engine's own cells in its
`Capabilities`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class InFlight(StrEnum):
    """What happens to requests that are running when the fleet pauses."""

    DRAIN = "drain"  # wait for them
    ABORT = "abort"  # end them now, with what they have
    RECOMPUTE = "recompute"  # stop them, continue on the new weights from recomputed keys and values
    KEEP = "keep"  # freeze them, continue on their old keys and values


class CachePolicy(StrEnum):
    """What happens to keys and values cached under the old weights."""

    RESET = "reset"
    NAMESPACE = "namespace"
    KEEP = "keep"


class InstallMode(StrEnum):
    """How new bytes become live. `auto` takes the engine's first."""

    AUTO = "auto"
    FLIP = "flip"
    EXCHANGE = "exchange"
    NONE = "none"


class CommitMode(StrEnum):
    AUTO = "auto"
    MANUAL = "manual"


class OnBusy(StrEnum):
    REFUSE = "refuse"
    WAIT = "wait"
    SUPERSEDE = "supersede"


class PreviousMode(StrEnum):
    """What happens to the rollback copy when an update is staged over it."""

    SPEND = "spend"
    KEEP_HOST = "keep_host"
    KEEP_ARCHIVE = "keep_archive"


class SourceLayout(StrEnum):
    """How tensors that a model keeps apart lie in one tensor of a checkpoint."""

    CONCATENATED = "concatenated"  # one after the other: [q, k, v], [gate, up]
    BY_KV_HEAD = "by_kv_head"  # for each head of keys: its queries, its key, its value
    INTERLEAVED = "interleaved"  # one element of each in turn: gate 0, up 0, gate 1, up 1
    STACKED = "stacked"  # experts along a new first dimension, each as it lies alone, its parts concatenated
    STACKED_TRANSPOSED = "stacked_transposed"  # the same with the last two dimensions exchanged


@dataclass(frozen=True, slots=True)
class Policy:
    """What a client chose for one update; the defaults are those of the public API. Times in seconds."""

    in_flight: InFlight = InFlight.DRAIN
    cache: CachePolicy = CachePolicy.RESET
    install: InstallMode = InstallMode.AUTO
    commit: CommitMode = CommitMode.AUTO
    on_busy: OnBusy = OnBusy.REFUSE
    previous: PreviousMode = PreviousMode.SPEND
    require_digests: bool = False
    allow_narrowing: tuple[tuple[str, str], ...] = ()  # (source dtype, parameter dtype), safetensors names
    allow_nonfinite: bool = False
    allow_suspicious: tuple[str, ...] = ()  # glob patterns of tensors that may hold no normal number
    layouts: tuple[tuple[str, SourceLayout], ...] = ()  # (glob pattern of tensors, how they lie); the first hit counts
    require_config: bool = False  # refuse a source whose config was not compared with the engine's
    allow_config: tuple[str, ...] = ()  # keys of the config, the tokenizer and the quantisation that may differ
    new_run: bool = False
    partial: bool = False
    deadline_s: float = 600.0  # the whole of PLANNING to READY
    quiesce_s: float = 30.0  # one attempt at pausing
    pause_lease_s: float = 30.0  # what a front waits, shut, before it reopens on its own
    attempts: int = 3


def conflict(policy: Policy) -> str | None:
    """Why no engine could honour this policy, or None. The answer is a 422 `mode_unsupported`."""
    if policy.in_flight is InFlight.KEEP and policy.cache is CachePolicy.RESET:
        return "in_flight=keep needs the keys and values that cache=reset drops"
    if policy.in_flight is InFlight.RECOMPUTE and policy.cache is CachePolicy.KEEP:
        return "in_flight=recompute would read back the old keys and values that cache=keep leaves"
    if policy.install is InstallMode.NONE:
        return "install=none (no spare) is not supported yet"
    if policy.previous is not PreviousMode.SPEND:
        return f"previous={policy.previous.value} is not supported yet"
    if policy.partial:
        return "partial updates are not supported yet"
    for name in ("deadline_s", "quiesce_s", "pause_lease_s"):
        if not 0 < getattr(policy, name) <= 86_400:
            return f"{name} must lie in (0, 86400] seconds"
    if not 1 <= policy.attempts <= 10:
        return "attempts must lie in 1 to 10"
    return None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one engine supports. `cells` lists the (in_flight, cache) pairs that it honours."""

    cells: tuple[tuple[InFlight, CachePolicy], ...]
    install: tuple[InstallMode, ...] = (InstallMode.FLIP, InstallMode.EXCHANGE)
    transports: tuple[str, ...] = ("disk", "broadcast", "shared_memory", "cuda_ipc")
    notes: tuple[str, ...] = field(default=())  # why a cell is refused, for people

    def offers(self) -> str:
        """What can be asked for instead of what was refused."""
        cells = ", ".join(f"{in_flight.value} with {cache.value}" for in_flight, cache in self.cells)
        install = ", ".join(mode.value for mode in self.install)
        return f"it supports (in_flight with cache) {cells}; install {install}; transport {', '.join(self.transports)}"

    def refuses(self, policy: Policy, transport: str) -> str | None:
        """Why this engine cannot honour the policy, or None."""
        if (policy.in_flight, policy.cache) not in self.cells:
            return f"in_flight={policy.in_flight.value} with cache={policy.cache.value}"
        if policy.install is not InstallMode.AUTO and policy.install not in self.install:
            return f"install={policy.install.value}"
        if transport not in self.transports:
            return f"transport={transport}"
        return None
