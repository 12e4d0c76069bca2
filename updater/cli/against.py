"""`liveweights inspect DIR --against URL`: would a push of this folder be refused? The fleet plans it, and that is all.

What needs no tensor byte is judged by the fleet itself: a dry run asks every rank, as a push would. What the bytes are
judged by is looked at here, by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from trainer_side.client.client import Client
from transports.base import Read
from transports.digest import add, region_digest, to_hex
from transports.disk.manifests import slabs
from transports.disk.source import DiskSource
from transports.scans import has_normal, judged, nonfinite
from updater.cli import views
from updater.core.errors import Failure, LiveweightsError, Unauthorized, Unavailable, grouped, told
from updater.core.participant import NOT_COMPARED, Compared
from updater.protocol import wire
from updater.protocol.answers import ModelState, Receipt
from updater.protocol.manifest import TensorSpec, real_path
from updater.protocol.model_document import ModelDocument, compare

SHOWN = 40
#: Keys of a config that the fleet names one by one; where there are more, they are compared here as well.
_NAMED = 100
#: A publication of another client ends a dry run; it is asked again, so often.
_AGAIN = 5
_BLANK = "no normal number is in it, only zeros and subnormals"

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PlannedPush:
    """`version`: that would be pushed; None: the next one. `policy`: as in the body of an update. `headers`: read no
    tensor.
    """

    url: str
    version: str | None
    policy: Mapping[str, Any]
    headers: bool = False


@dataclass(frozen=True, slots=True)
class Against:
    """`version`: what is live. `planned`: every rank could place the folder. `content`: whether tensors were read.

    `refused`: what a push would be refused for, in the order in which it would be found; `code` and `hint` of the
    first; empty where it would be published.
    """

    url: str
    version: str
    replica: str
    compared: Compared
    planned: bool
    content: Literal["read", "not read"]
    refused: tuple[Failure, ...]
    warnings: tuple[str, ...]

    @property
    def code(self) -> str:
        return self.refused[0].code if self.refused else ""

    @property
    def hint(self) -> str:
        groups = grouped(self.refused)
        return groups[0].hint if groups else ""

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        fields = {name: getattr(self, name) for name in ("url", "version", "replica", "planned", "content")}
        return fields | {
            "compared": wire.plain(self.compared),
            "would_be_refused": bool(self.refused),
            "code": self.code,
            "hint": self.hint,
            "refused": wire.plain(list(self.refused)),
            "warnings": list(self.warnings),
        }


def look(path: Path, client: Client, asked: PlannedPush, progress: Progress = lambda _bytes: None) -> Against:
    """Raises LiveweightsError where the fleet does not answer, or cannot answer now."""
    fleet = client.model()
    receipt, refused = _planned(path, client, asked)
    document = _document(path)
    warnings = receipt.warnings if receipt is not None else []
    if document is not None and fleet.document is not None and receipt is None:
        refused = _with_config(refused, document, fleet, asked.policy)
    if fleet.document is None:
        warnings = [*warnings, "no replica of this fleet says what it runs on"]
    read = receipt is not None and not asked.headers
    if read:
        refused, noted = _of_content(list(_contents(path, progress)), client, fleet, asked.policy)
        warnings = [*warnings, *noted]
    return Against(
        url=asked.url,
        version=fleet.version or "",
        replica=fleet.replica,
        compared=receipt.compared if receipt is not None else NOT_COMPARED,
        planned=receipt is not None,
        content="read" if read else "not read",
        refused=refused,
        warnings=tuple(warnings),
    )


def _planned(path: Path, client: Client, asked: PlannedPush) -> tuple[Receipt | None, tuple[Failure, ...]]:
    """The receipt of a dry run, or why it was refused. It waits for what another client publishes."""
    body: dict[str, Any] = {"path": real_path(str(path)), "dry_run": True}
    body["policy"] = dict(asked.policy) | {"on_busy": "wait"}
    if asked.version is not None:
        body["version"] = int(asked.version) if asked.version.isdecimal() else asked.version
    for _ in range(_AGAIN):
        try:
            return client.update(body), ()
        except (Unauthorized, Unavailable):
            raise
        except LiveweightsError as error:
            last = error
            if error.code != "superseded":
                return None, error.failures
    raise last


def _document(path: Path) -> ModelDocument | None:
    """What the folder says of its model; None where it cannot be read, which the plan says better."""
    try:
        with DiskSource.open(str(path), ("/",)) as source:
            return source.document()
    except LiveweightsError:
        return None


def _with_config(
    refused: tuple[Failure, ...], document: ModelDocument, fleet: ModelState, policy: Mapping[str, Any]
) -> tuple[Failure, ...]:
    """With every key in which the config differs, where the fleet found something else first, or names only some."""
    named = [failure for failure in refused if failure.code == "config_mismatch"]
    if named and len(named) < _NAMED:
        return refused
    ours = wire.build(ModelDocument, fleet.document)
    found = compare(document, ours, policy.get("allow_config", ()), most=None).refused
    return (*(failure for failure in refused if failure not in named), *(found or named))


# --- what the bytes are judged by


def _contents(path: Path, progress: Progress) -> Iterator[FileContent]:
    with DiskSource.open(str(path), ("/",)) as source:
        yield from contents(source, progress)


def _of_content(
    found: list[FileContent], client: Client, fleet: ModelState, policy: Mapping[str, Any]
) -> tuple[tuple[Failure, ...], list[str]]:
    """(refusals, warnings): what is not finite is seen while it is staged, the rest by the vote."""
    odd = [each for each in found if each.nonfinite]
    if odd and not policy.get("allow_nonfinite"):
        return tuple(Failure("tensor_nonfinite", "NaN or infinity", tensor=e.name, file=e.file) for e in odd), []
    changed = [each for each in found if each.promised and each.digest != each.promised]
    failures = [
        Failure("tensor_digest", f"digest {e.digest}, the manifest says {e.promised}", tensor=e.name, file=e.file)
        for e in changed
    ]
    allowed = (*policy.get("allow_suspicious", ()), *fleet.allow_suspicious)
    blank = [each for each in found if each.blank]
    live = _live_digests(client, fleet.manifest_digest) if blank else {}
    warnings = []
    for each in blank:
        if each.promised:
            warnings.append(f"suspicious, but as its digest promises: {_BLANK}: {each.name}")
        elif any(fnmatchcase(each.name, glob) for glob in allowed):
            warnings.append(f"allowed although suspicious: {_BLANK}: {each.name}")
        elif live.get(each.name) == each.digest:
            warnings.append(f"suspicious, and live already: {_BLANK}: {each.name}")
        else:
            hint = "if it is meant so, name it in allow_suspicious, or bring a manifest with digests"
            text = f"{_BLANK}; refused where the live one has some"
            failures.append(Failure("tensor_suspicious", text, tensor=each.name, file=each.file, hint=hint))
    return tuple(failures), warnings


def _live_digests(client: Client, digest: str) -> dict[str, str]:
    """Of the manifest of what is live, where the fleet has one."""
    if not digest:
        return {}
    try:
        return {each["name"]: each["digest"] for each in client.manifest(digest)["tensors"]}
    except LiveweightsError:
        return {}


def show(found: Against) -> None:
    out = views.out
    compared = wire.plain(found.compared)
    rows = [(name, "not compared" if held == "none" else "compared") for name, held in compared.items()]
    rows += [("names, shapes, dtypes", "planned by every rank" if found.planned else "refused")]
    rows += [("values", found.content)]
    title = f"against {found.version or 'no version'} of {found.url}"
    out.print(views.table(title, ("what", "held against the fleet"), rows))
    for warning in found.warnings:
        out.print(f"warning: {warning}", style="yellow", markup=False)
    if found.refused:
        faults = [(each.code, each.replica, each.file, each.tensor, each.message) for each in found.refused[:SHOWN]]
        columns = ("code", "replica", "file", "tensor", "what")
        out.print(views.table(f"{len(found.refused)} refusals", columns, faults))
        out.print(f"A push would be refused: {told(grouped(found.refused))}", markup=False, soft_wrap=True)
    else:
        what = "" if found.content == "read" else ", as far as can be said without reading its tensors"
        out.print(f"A push would be published{what}.", markup=False)


@dataclass(frozen=True, slots=True)
class FileContent:
    """Of one tensor. `promised`: the digest that the manifest has for it, or empty. `digest`: of the bytes.

    `nonfinite`: a NaN or an infinity is in it. `blank`: it should hold a normal number, and holds none.
    """

    name: str
    file: str
    promised: str
    digest: str
    nonfinite: bool
    blank: bool


def contents(source: DiskSource, progress: Callable[[int], None] = lambda _bytes: None) -> Iterator[FileContent]:
    """Every tensor that the manifest does not list as ignored. Digests are computed of those with a promise, and of
    those that are blank. Raises Aborted where files change or fail while they are read.
    """
    manifest = source.manifest
    ignored = manifest.ignored if manifest is not None else ()
    promised = {entry.name: entry.digest for entry in manifest.tensors} if manifest is not None else {}
    for name, spec in source.specs.items():
        if not any(fnmatchcase(name, pattern) for pattern in ignored):
            yield _content(source, spec, promised.get(name, ""), progress)
    source.recheck()


def _content(source: DiskSource, spec: TensorSpec, promised: str, progress: Callable[[int], None]) -> FileContent:
    odd, blank, total = False, judged(spec), 0
    for slab in slabs(spec):
        source.read([Read(spec.name, slab.box, slab.room)], progress=progress)
        odd = odd or nonfinite(slab.room)
        blank = blank and not has_normal(slab.room, spec.dtype)
        if promised or blank:
            total = add(total, region_digest(slab.room, spec.shape, spec.dtype, slab.box))
    digest = to_hex(total) if promised or blank else ""
    return FileContent(spec.name, source.places[spec.name].file, promised, digest, odd, blank and spec.numel > 0)
