"""Values of the simulation: ranks that are a few strings, requests, sources, packets, what survives a coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from updater.core.fleet import events, lineage, recovery
from updater.core.fleet import machine as fleet
from updater.core.fleet.effects import Record, Send
from updater.core.fleet.state import Fleet
from updater.core.participant import DiskOffer, Offer
from updater.core.replica import machine as replica
from updater.core.replica.state import Work


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
class SimulatedSource:
    """What lies at a path. `promised`: digest in the manifest beside it, empty where there is none."""

    content: str
    promised: str = ""


def source_of(offer: Offer | None) -> str:
    """What names the bytes of an offer in a simulation: the path, or where a stream would come from."""
    if offer is None:
        return ""
    return offer.path if isinstance(offer, DiskOffer) else offer.address


@dataclass(frozen=True, slots=True)
class Machines:
    """What is under test: the real modules, or broken copies of them."""

    fleet: Any = fleet
    replica: Any = replica
    recovery: Any = recovery
    lineage: Any = lineage


@dataclass(frozen=True, slots=True)
class Packet:
    """On the wire. `to` is a replica, or "" for the coordinator. `epoch`: the life of the coordinator that it left or
    is for; replies to a dead one go nowhere.
    """

    number: int
    to: str
    epoch: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Action:
    """Something that may happen. `kind` names a method `do_<kind>` of the simulation."""

    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.kind, *(str(arg) for arg in self.args)])


@dataclass(slots=True)
class Disk:
    """What survives a coordinator."""

    records: list[Record] = field(default_factory=list)
    members: dict[str, lineage.KnownMember] = field(default_factory=dict)
    epoch: int = 0
    serial: int = 0
    fleet: str = "fleet"
    gone: list[tuple[str, str]] = field(default_factory=list)
    taken_over: bool = False

    def copy(self) -> Disk:
        return replace(self, records=list(self.records), members=dict(self.members), gone=list(self.gone))

    def known(self) -> lineage.KnownJournal:
        """What a new life of a coordinator reads."""
        members = tuple(self.members.values())
        return lineage.KnownJournal(
            tuple(self.records), members, self.epoch, self.serial, tuple(self.gone), self.taken_over
        )

    def remove(self, replica: str) -> None:
        member = self.members.pop(replica, None)
        if member is not None:
            self.gone.append((replica, member.incarnation))


@dataclass(frozen=True, slots=True)
class Parked:
    """A coordinator that stands still, with its journal."""

    state: Fleet | None
    disk: Disk
    outbox: dict[str, Send]
    deadline: events.Deadline | None
    backoff: events.BackoffEnded | None
    durable: list[events.Recorded]
