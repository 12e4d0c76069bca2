"""What the messages of every protocol are made of, and those that all have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from updater.core.errors import Failure
from updater.core.release import ORDER, RELEASE

#: Patience that a sender may ask of its receivers, in seconds.
LONGEST_PATIENCE_S = 3600.0
#: A sender that waits says so at least this often, in seconds.
SIGN_S = 1.0

STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_PATIENCE_S, allow_inf_nan=False)]


def other_release(protocol: int, wanted: int, release: str) -> Failure | None:
    """What a sender has against a receiver whose hello says `protocol` and `release`, or None. `wanted`: its own number
    of the protocol. A hello of 0.1.0 names no release.
    """
    if (protocol, release) == (wanted, RELEASE):
        return None
    theirs = f"of release {release or '0.1.0'} (stream protocol {protocol})"
    text = f"the replica is {theirs}, the trainer of {RELEASE} (stream protocol {wanted})"
    return Failure("release_mismatch", text, hint=f"{ORDER}; then run the trainer on that release too")


@dataclass(frozen=True, slots=True)
class Waiting:
    """The sender is well; what keeps it is another receiver, which it will name when its own patience ends."""

    kind: Literal["waiting"] = "waiting"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Nothing follows, and why; its sender hangs up then. From a receiver also: its mappings are gone."""

    failures: tuple[Failure, ...] = ()
    kind: Literal["goodbye"] = "goodbye"
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
