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

`updater.core.codes` is the whole vocabulary: an error with a code that is not listed there cannot be made. Many
failures are told by code (`grouped`, `told`): over HTTP, on the command line and by exceptions with the same text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from updater.core.codes import TABLE

#: code -> HTTP status. `updater.core.codes` has the whole table, and writes docs/errors.md.
CODES: dict[str, int] = {name: row.status for name, row in TABLE.items()}
#: Codes after which the same request may succeed without anybody changing anything.
RETRYABLE = frozenset(name for name, row in TABLE.items() if row.retry)
#: What one node of a shared file system says for as long as it does not see what another one wrote.
SIGHT = frozenset({"source_missing", "shard_missing", "file_truncated"})
#: Different messages of one code that a text shows.
EXAMPLES = 3
#: Failures that a problem document and a receipt list one by one.
IN_DOCUMENT, IN_RECEIPT = 100, 1000


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that went wrong at one place. Empty fields do not apply.

    `hint`: the way out, where there is one: the argument to pass, the option to set or the command to run. Left out, it
    is the usual one of the code.
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
        if not self.hint:
            object.__setattr__(self, "hint", TABLE[self.code].hint)

    def at(self, *, replica: str | None = None, rank: int | None = None) -> Failure:
        """The same failure with its place filled in, unless it already names one."""
        return replace(
            self,
            replica=self.replica or replica or "",
            rank=rank if self.rank is None else self.rank,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The failures of one code. `examples`: up to three that say different things, the first one first.

    `replicas`, `ranks`, `tensors`, `files`: how many different ones the failures name.
    """

    code: str
    count: int
    examples: tuple[Failure, ...]
    hint: str = ""
    replicas: int = 0
    ranks: int = 0
    tensors: int = 0
    files: int = 0


def grouped(failures: Iterable[Failure]) -> tuple[Group, ...]:
    """The failures by code, in the order of the first of each. A closer hint goes before the usual one of the code."""
    by_code: dict[str, list[Failure]] = {}
    for failure in failures:
        by_code.setdefault(failure.code, []).append(failure)
    return tuple(_group(code, of_code) for code, of_code in by_code.items())


def _group(code: str, failures: list[Failure]) -> Group:
    different = {failure.message: failure for failure in reversed(failures)}
    return Group(
        code=code,
        count=len(failures),
        examples=tuple(different[message] for message in dict.fromkeys(each.message for each in failures))[:EXAMPLES],
        hint=next((each.hint for each in failures if each.hint != TABLE[code].hint), TABLE[code].hint),
        replicas=len({each.replica for each in failures if each.replica}),
        ranks=len({(each.replica, each.rank) for each in failures if each.rank is not None}),
        tensors=len({each.tensor for each in failures if each.tensor}),
        files=len({each.file for each in failures if each.file}),
    )


def worth_a_retry(failures: Sequence[Failure], whole: Collection[str] = ()) -> bool:
    """Whether the same request may succeed later. `whole`: replicas that read the source's files without a fault.

    What one replica misses and another one reads is a shared file system that has not caught up.
    """
    if not failures:
        return False
    missing = {failure.replica for failure in failures if failure.code in SIGHT}
    late = failures[0].code in SIGHT and any(replica not in missing for replica in whole)
    return late or failures[0].code in RETRYABLE


def told(groups: Iterable[Group]) -> str:
    """One text for people: what went wrong, how often and where, and after it the ways out."""
    groups = tuple(groups)
    hints = dict.fromkeys(group.hint for group in groups if group.hint)
    return "; ".join(map(_line, groups)) + "".join(f". Hint: {hint}" for hint in hints)


class LiveweightsError(Exception):
    """Base. `failures[0].code` is the code of the whole; `live_version` is what serves now, as a label.

    `groups`: the failures by code, where they are more than are listed. `retryable`: whether the same request may
    succeed later; else the code decides. `receipt`: on the client's side, the receipt that a problem document carried,
    as JSON-ready values.
    """

    def __init__(
        self,
        *failures: Failure,
        live_version: str | None = None,
        receipt: Mapping[str, object] | None = None,
        groups: tuple[Group, ...] = (),
        retryable: bool | None = None,
    ) -> None:
        if not failures:
            raise ValueError("an error needs at least one failure")
        self.groups = groups or grouped(failures)
        super().__init__(told(self.groups))
        self.failures = failures
        self.live_version = live_version
        self.receipt = receipt
        self.retryable = worth_a_retry(failures) if retryable is None else retryable

    def __reduce__(self) -> tuple[object, ...]:
        """Copied, and carried between processes, whole: a subclass may be made of other arguments than `args`."""
        return _remade, (type(self), self.args), self.__dict__

    @property
    def code(self) -> str:
        return self.failures[0].code

    @property
    def status(self) -> int:
        """HTTP status."""
        return CODES[self.code]

    @property
    def hint(self) -> str:
        """The way out that the first group names, if it names one."""
        return self.groups[0].hint


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


def _remade(kind: type[LiveweightsError], args: tuple[object, ...]) -> LiveweightsError:
    return kind.__new__(kind, *args)


def _line(group: Group) -> str:
    first, rest = group.examples[0], group.examples[1:]
    if group.count == 1:
        return f"{group.code}: {first.message}{_at(first)}"
    if not rest:
        counts = (
            _number(group.tensors, "tensor"),
            _number(group.files, "file"),
            _number(group.ranks, "rank"),
            _number(group.replicas, "replica"),
        )
        where = ", ".join(filter(None, (f"{group.count} times", *counts, _places(first) and f"first {_places(first)}")))
        return f"{group.code}: {first.message} ({where})"
    more = group.count - len(group.examples)
    lines = "; ".join(f"{each.message}{_at(each)}" for each in group.examples)
    return f"{group.code}: {lines}" + (f"; and {more} more" if more else "")


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}" if count else ""


def _at(failure: Failure) -> str:
    where = _places(failure)
    return f" ({where})" if where else ""


def _places(failure: Failure) -> str:
    places = (
        f"replica {failure.replica}" if failure.replica else "",
        f"rank {failure.rank}" if failure.rank is not None else "",
        f"file {failure.file}" if failure.file else "",
        f"tensor {failure.tensor}" if failure.tensor else "",
    )
    return ", ".join(place for place in places if place)
