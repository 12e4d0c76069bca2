"""Which release speaks, and the number of its messages. Unequal ones in one fleet are refused by name.

A message that says neither is of 0.1.0, which had no numbers.
"""

from __future__ import annotations

from updater.core.errors import Failure
from updater.core.participant import FrontStatus

#: Raised with every change of a message that the other side has to know of.
RELEASE, WIRE = "0.2.0", 2
ORDER = "upgrade the coordinator first, then restart the replicas on its release, one by one"


def mismatch(status: FrontStatus) -> Failure | None:
    """Why a front of another release is not spoken to, or None for one of ours."""
    if (status.release, status.wire) == (RELEASE, WIRE):
        return None
    return unequal(status.replica, status.release, status.wire)


def unequal(replica: str, release: str, wire: int) -> Failure:
    return Failure(
        "release_mismatch",
        f"the replica is of release {release} (messages {wire}), the coordinator of {RELEASE} (messages {WIRE})",
        replica=replica,
        hint=f"restart the replica on release {RELEASE}; {ORDER}",
    )


def older_coordinator(replica: str, release: str) -> Failure | None:
    """What a front makes of the release that its coordinator says it has."""
    if release == RELEASE:
        return None
    text = f"the coordinator is of release {release or '0.1.0'}, the replica of {RELEASE}"
    return Failure("release_mismatch", text, replica=replica, hint=ORDER)
