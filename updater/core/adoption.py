"""A coordinator without the fleet's journal takes the fleet over, because an operator says so (I11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from updater.core.errors import Failure
from updater.core.lineage import ADOPTION, PAUSED, SHUT_INSTALLED, Journal, Reports, replay
from updater.core.participant import FrontState, FrontStatus
from updater.core.recovery import Recovery, published
from updater.core.state import FleetState


@dataclass(frozen=True, slots=True)
class Adoption:
    """Which fleet, and the epoch to lead it with. If `refusal` is set, nothing may be sent to its fronts."""

    fleet: str = ""
    epoch: int = 0
    refusal: Failure | None = None


def may_adopt(journal: Journal, reports: Reports) -> Adoption:
    """`reports`: status of each front that an operator named. A silent front may be adopted too: it is `lost`, and
    blocks.
    """
    answered = [report for report in reports.values() if report is not None]
    fleets = sorted({report.fleet for report in answered if report.fleet})
    if len(fleets) != 1:
        why = f"they belong to {len(fleets)} fleets: {', '.join(fleets) or 'none of them has ever been in one'}"
        return Adoption(refusal=Failure("adopt_needed", why, hint="name the fronts of one fleet"))
    for report in answered:
        if report.state in (*PAUSED, *SHUT_INSTALLED):
            hint = "wait for the end of its pause, or open it first: liveweights release URL --to live or previous"
            busy = Failure("wrong_phase", f"is {report.state.value} in an update", replica=report.replica, hint=hint)
            return Adoption(refusal=busy)
    if len({(r.live_version, r.live_digest) for r in _proofs(answered)}) != 1:
        said = tuple(f"{r.replica} {r.live_version} {r.live_digest[:12]} ({r.state.value})" for r in answered)
        hint = "adopt those that serve one version; restart the others to let them join"
        why = f"they do not hold one version: {', '.join(said)}"
        return Adoption(refusal=Failure("adopt_needed", why, hint=hint))
    newest = max([journal.epoch, *(r.epoch for r in journal.records), *(report.epoch for report in answered)])
    return Adoption(fleets[0], (newest // ADOPTION + 1) * ADOPTION)


def adopt(adoption: Adoption, journal: Journal, reports: Reports, *, owner: str = "") -> Recovery:
    """`journal.members`: the named fronts. `reports`: what they answered to `lead`, None for a silent one."""
    answered = [report for report in reports.values() if report is not None]
    serial = max([journal.serial, *(r.serial for r in journal.records), *(r.serial for r in answered)])
    state = FleetState(adoption.fleet, adoption.epoch, serial, owner=owner, gone=journal.gone)
    return published(replay(state, journal.records), journal, reports, _proofs(answered)[0])


def _proofs(reports: Sequence[FrontStatus]) -> list[FrontStatus]:
    """The fronts that prove what the fleet serves: those that serve or were shut as orphans; if there are none, those
    that had served.
    """
    serving = [report for report in reports if report.state in (FrontState.OPEN, FrontState.ORPHANED)]
    return serving or [report for report in reports if report.fleet and report.state is FrontState.JOINING]
