"""The error tree. An error's class says the consequence, its `code` the cause; `Failure` names the place.

```
LiveweightsError
├── Rejected      nothing was staged or spent: the fleet is as it was
├── Aborted       staging was spent, nothing was installed: the old version serves
├── RolledBack    something was installed and taken back: the old version serves
├── Unavailable   the coordinator or an engine cannot answer now; a retry makes sense
├── Unauthorized  no or wrong token
└── Quarantined   of a member, not of an update: it stays shut until audited or restarted
```

`CODES` is the whole vocabulary, with the HTTP status of each: an error with a code that is not listed cannot be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

#: code -> HTTP status. 409 busy or wrong phase, 412 version preconditions, 422 refused content, 424 a rank failed.
CODES: dict[str, int] = {
    # requests
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "address_refused": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "id_reused": 422,
    "busy": 409,
    "wrong_phase": 409,
    "superseded": 409,
    "replica_id_taken": 409,
    "member_blocked": 409,
    "version_not_served": 409,
    "stale_version": 412,
    "base_mismatch": 412,
    "expected_mismatch": 412,
    "no_rollback": 412,
    "adopt_needed": 412,
    "no_members": 503,
    "mode_unsupported": 422,
    "transport_unsupported": 422,
    "adapter_unsupported": 422,
    # sources: files
    "source_outside_roots": 422,
    "source_missing": 422,
    "source_changed": 422,
    "source_ambiguous": 422,
    "file_truncated": 422,
    "file_header": 422,
    "file_dtype": 422,
    "file_range": 422,
    "file_duplicate": 422,
    "index_mismatch": 422,
    "shard_missing": 422,
    "read_failed": 424,
    # sources: streams
    "stream_mismatch": 422,
    "peer_lost": 424,
    "peer_timeout": 424,
    # content
    "manifest_invalid": 422,
    "manifest_mismatch": 422,
    "manifest_required": 422,
    "config_mismatch": 422,
    "tensor_missing": 422,
    "tensor_unexpected": 422,
    "tensor_duplicate": 422,
    "tensor_shape": 422,
    "tensor_dtype": 422,
    "tensor_narrowing": 422,
    "tensor_nonfinite": 422,
    "tensor_suspicious": 422,
    "tensor_digest": 422,
    "tensor_unwritten": 422,
    "placement_refused": 422,
    "copies_differ": 422,
    # ranks and members
    "no_space": 424,
    "rank_failed": 424,
    "rank_died": 424,
    "rank_steps_differ": 424,
    "replica_lost": 424,
    "replica_fenced": 424,
    "replica_asleep": 424,
    "cache_not_reset": 424,
    "quiesce_timeout": 424,
    "phase_timeout": 424,
    "lease_expired": 409,
    "client_abort": 409,
    "coordinator_restarted": 503,
    "journal_failed": 503,
    "shut": 503,
    "queue_full": 503,
    "aborted_by_update": 503,
    "unreachable": 503,
    "internal": 500,
}

#: Codes after which the same request may succeed without anybody changing anything.
RETRYABLE = frozenset(
    code for code, status in CODES.items() if status in (409, 424, 503) and code not in ("replica_id_taken",)
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that went wrong at one place. Strings only; empty fields do not apply.

    `hint`: the way out, where there is one: the argument to pass, the option to set or the command to run.
    """

    code: str
    message: str
    replica: str = ""
    rank: int | None = None
    tensor: str = ""
    file: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"unknown failure code {self.code!r}")

    def at(self, *, replica: str | None = None, rank: int | None = None) -> Failure:
        """The same failure with its place filled in, unless it already names one."""
        return replace(
            self,
            replica=self.replica or replica or "",
            rank=rank if self.rank is None else self.rank,
        )


class LiveweightsError(Exception):
    """Base. `failures[0].code` is the code of the whole; `live_version` is what serves now, as a label.

    `receipt`: on the client's side, the receipt that a problem document carried, as JSON-ready values.
    """

    def __init__(
        self,
        *failures: Failure,
        live_version: str | None = None,
        receipt: Mapping[str, object] | None = None,
    ) -> None:
        if not failures:
            raise ValueError("an error needs at least one failure")
        super().__init__("; ".join(_line(failure) for failure in failures))
        self.failures = failures
        self.live_version = live_version
        self.receipt = receipt

    @property
    def code(self) -> str:
        return self.failures[0].code

    @property
    def status(self) -> int:
        """HTTP status."""
        return CODES[self.code]

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


class Rejected(LiveweightsError):
    """Nothing was staged or spent."""


class Aborted(LiveweightsError):
    """Staging was spent, nothing was installed."""


class RolledBack(LiveweightsError):
    """Installed somewhere and taken back everywhere."""


class Unavailable(LiveweightsError):
    """Cannot answer now."""


class Unauthorized(LiveweightsError):
    """No or wrong token."""


class Quarantined(LiveweightsError):
    """A member whose state is not known to be one version."""


def refuse(code: str, message: str, *, tensor: str = "", file: str = "", hint: str = "") -> Rejected:
    """Shorthand for the common case: one refusal at one place."""
    return Rejected(Failure(code, message, tensor=tensor, file=file, hint=hint))


def _line(failure: Failure) -> str:
    places = (
        f"replica {failure.replica}" if failure.replica else "",
        f"rank {failure.rank}" if failure.rank is not None else "",
        f"file {failure.file}" if failure.file else "",
        f"tensor {failure.tensor}" if failure.tensor else "",
    )
    where = ", ".join(place for place in places if place)
    return f"{failure.code}: {failure.message}" + (f" ({where})" if where else "")
