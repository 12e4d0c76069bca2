"""Errors as RFC 9457 problem documents, and documents and receipts as errors: what every server and client shares.

Pure: no web framework and no IO. `updater.server.guard` makes answers of the documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from updater.core.errors import (
    CODES,
    IN_DOCUMENT,
    Aborted,
    Failure,
    Group,
    LiveweightsError,
    Quarantined,
    Rejected,
    RolledBack,
    Unauthorized,
    Unavailable,
)
from updater.protocol import wire

if TYPE_CHECKING:
    from updater.protocol.answers import Receipt

#: The `outcome` member of a document, and the class that a client raises for it.
KINDS: dict[str, type[LiveweightsError]] = {
    "rejected": Rejected,
    "aborted": Aborted,
    "rolled_back": RolledBack,
    "unavailable": Unavailable,
    "unauthorized": Unauthorized,
    "quarantined": Quarantined,
}
#: The code of an answer that is no document of ours.
BY_STATUS = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    503: "shut",
}


class RejectedWith(Rejected):
    """A refusal whose document has more members than the standard ones."""

    def __init__(self, *failures: Failure, live_version: str | None = None, members: Mapping[str, Any]) -> None:
        super().__init__(*failures, live_version=live_version)
        self.members = dict(members)


def problem_body(error: LiveweightsError, **extra: Any) -> dict[str, Any]:
    """The document of one error: RFC 9457 members, then ours. `extra` adds members, for example `receipt`."""
    return {
        "type": f"urn:liveweights:{error.code}",
        "title": error.code.replace("_", " "),
        "status": error.status,
        "detail": str(error),
        "code": error.code,
        "outcome": next((name for name, kind in KINDS.items() if isinstance(error, kind)), "unavailable"),
        "retryable": error.retryable,
        "live_version": error.live_version,
        "hint": error.hint,
        "groups": [wire.plain(group) for group in error.groups],
        "failures": [wire.plain(failure) for failure in error.failures[:IN_DOCUMENT]],
        "failures_count": sum(group.count for group in error.groups),
        **(error.members if isinstance(error, RejectedWith) else {}),
        **extra,
    }


def terse(document: Mapping[str, Any]) -> dict[str, Any]:
    """A problem document for callers without the admin scope: codes, and no text that came from inside."""
    codes = [str(failure["code"]) for failure in document["failures"]]
    members = ("type", "title", "status", "code", "outcome", "retryable", "live_version")
    return {
        **{name: document[name] for name in members},
        "detail": document["code"],
        "failures": [wire.plain(Failure(code, "")) for code in dict.fromkeys(codes)],
    }


def failures_of(document: object, *, fallback: str = "internal") -> tuple[Failure, ...]:
    """The failures of a problem document that came from outside; what cannot be read becomes one `fallback` failure.

    A peer of another release may send codes that this one does not know: they become `fallback`, with text and place
    kept.
    """
    told: Mapping[str, Any] = document if isinstance(document, Mapping) else {}
    entries = told.get("failures")
    found = [_failure(entry, fallback) for entry in (entries if isinstance(entries, list) else ())]
    if not found:
        text = told.get("detail") or "the answer is not a problem document"
        found.append(Failure(fallback, str(text)[:500]))
    return tuple(found)


def known_failure(told: Any, fallback: str = "internal") -> Any:
    """The JSON of a failure, with `fallback` for a code that this release does not know."""
    if not isinstance(told, Mapping):
        return told
    code = told.get("code")
    return told if isinstance(code, str) and code in CODES else {**told, "code": fallback}


def known_group(told: Any) -> Any:
    """The same for the examples of a group. Its own code is a text, and stays."""
    examples = told.get("examples") if isinstance(told, Mapping) else None
    return {**told, "examples": [known_failure(each) for each in examples]} if isinstance(examples, list) else told


def _failure(entry: object, fallback: str) -> Failure:
    try:
        return wire.build(Failure, known_failure(entry, fallback))
    except (wire.WireError, ValueError):
        return Failure(fallback, str(entry)[:500])


def error_of(status: int, document: object, *, fallback: str = "internal") -> LiveweightsError:
    """The error that a problem document tells of, for clients. `status` decides where the document is unreadable."""
    failures = failures_of(document, fallback=BY_STATUS.get(status, fallback))
    told: Mapping[str, Any] = document if isinstance(document, Mapping) else {}
    kind = KINDS.get(str(told.get("outcome")), Unavailable if CODES[failures[0].code] == 503 else Rejected)
    live, receipt, groups, again = (told.get(key) for key in ("live_version", "receipt", "groups", "retryable"))
    return kind(
        *failures,
        live_version=live if isinstance(live, str) else None,
        receipt=receipt if isinstance(receipt, Mapping) else None,
        groups=_groups(groups) if isinstance(groups, list) else (),
        retryable=again if isinstance(again, bool) else None,
    )


def receipt_error(receipt: Receipt, live_version: str | None = None) -> LiveweightsError | None:
    """None for a committed or planned one. `live_version`: where more is known than when it ended."""
    if receipt.outcome not in KINDS:
        return None
    reason = {"code": receipt.reason, "message": receipt.outcome}
    return KINDS[receipt.outcome](
        *(receipt.failures or (_failure(reason, "internal"),)),
        live_version=live_version or receipt.live_version,
        receipt=receipt.model_dump(mode="json"),
        groups=tuple(receipt.groups),
        retryable=receipt.retryable if receipt.groups else None,  # a receipt of 0.1.0 says neither
    )


def _groups(told: Iterable[object]) -> tuple[Group, ...]:
    """From outside. Empty if one of them cannot be read: the caller then groups what it has."""
    try:
        return tuple(wire.build(Group, each) for each in told)
    except (wire.WireError, ValueError):
        return ()
