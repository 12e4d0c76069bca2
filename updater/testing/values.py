"""Values of the simulated replica: ranks that are a few strings, requests, work in progress, sources."""

from __future__ import annotations

from dataclasses import dataclass, field

from updater.core.participant import DiskOffer, Offer
from updater.core.replica_state import Work


class Violation(AssertionError):
    """A promise was broken. `invariant` is its number in docs/protocol.md, as `I3`."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


@dataclass(slots=True)
class Rank:
    """`live` and `spare` are bytes; `label` is what replies say and `namespace` what new cache entries are filed under.
    `flips`: (serial, attempt) whose installation this rank carries now.
    """

    live: str
    spare: str = "untouched"
    label: str = "start"
    namespace: tuple[str, str] = ("start", "")
    paused: bool = True
    flips: list[tuple[int, int]] = field(default_factory=list)
    installs: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Token:
    """What a client got: the label that came with it, and the bytes that really made it, per rank."""

    label: str
    made_by: tuple[str, ...]


@dataclass(slots=True)
class Request:
    """One client request. `mode` is the in-flight mode that ended or survived a pause with it."""

    number: int
    prefix: int
    tokens: list[Token] = field(default_factory=list)
    done: bool = False


@dataclass(slots=True)
class Job:
    """Work in progress; `position` counts what was done of it."""

    work: Work
    position: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """What lies at a path. `promised`: digest in the manifest beside it, empty where there is none."""

    content: str
    promised: str = ""


def source_of(offer: Offer | None) -> str:
    """What names the bytes of an offer in a simulation: the path, or where a stream would come from."""
    if offer is None:
        return ""
    return offer.path if isinstance(offer, DiskOffer) else offer.address
