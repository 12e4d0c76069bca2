"""What a receipt says, as the error that it is answered with: the same on both sides of the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from updater import wire
from updater.core.errors import CODES, Aborted, Failure, Group, LiveweightsError, Rejected, RolledBack
from updater.schemas import FailureBody, GroupBody, Receipt

OUTCOMES: dict[str, type[LiveweightsError]] = {"rejected": Rejected, "aborted": Aborted, "rolled_back": RolledBack}


def error_of(receipt: Receipt, live_version: str | None = None) -> LiveweightsError | None:
    """None for a committed one. `live_version`: where more is known than when it ended."""
    kind = OUTCOMES.get(receipt.outcome)
    if kind is None:
        return None
    failures = [_failure(each) for each in receipt.failures] or [
        Failure(_known(receipt.reason or "internal"), receipt.outcome)
    ]
    return kind(
        *failures,
        live_version=live_version or receipt.live_version,
        receipt=receipt.model_dump(mode="json"),
        groups=groups_of(group.model_dump() for group in receipt.groups),
        retryable=receipt.retryable if receipt.groups else None,  # a receipt of 0.1.0 says neither
    )


def groups_of(told: Iterable[object]) -> tuple[Group, ...]:
    """From outside. Empty if one of them cannot be read: the caller then groups what it has."""
    try:
        return tuple(wire.build(Group, each) for each in told)
    except (wire.WireError, ValueError):
        return ()


def group_body(group: Group) -> GroupBody:
    return GroupBody.model_validate(wire.plain(group))


def _failure(body: FailureBody) -> Failure:
    """A peer of another release may send codes that this one does not know."""
    told: dict[str, Any] = body.model_dump()
    return Failure(**{**told, "code": _known(body.code)})


def _known(code: str) -> str:
    return code if code in CODES else "internal"
