"""`liveweights inspect DIR --against URL`: a folder held against a live fleet, before anything is pushed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_side.client import Client
from transports.disk import DiskSource
from updater import wire
from updater.cli import views
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import NOT_COMPARED, Compared
from updater.manifest import TensorSpec
from updater.model_document import ModelDocument, compare

SHOWN = 40


@dataclass(frozen=True, slots=True)
class Against:
    """`tensors`: what the names, shapes and dtypes were held against: `manifest` of the live version, or `none`.

    `refused`: what a push of the folder would be refused for, of what could be compared here.
    """

    url: str
    version: str
    replica: str
    compared: Compared
    tensors: str
    refused: tuple[Failure, ...]
    warnings: tuple[str, ...]


def look(path: Path, client: Client, url: str, allowed: Sequence[str]) -> Against:
    """Raises LiveweightsError where the fleet does not answer. A folder that cannot be opened is refused."""
    fleet = client.model()
    ours = wire.build(ModelDocument, fleet.document) if fleet.document is not None else None
    version, replica = fleet.version or "", fleet.replica
    try:
        with DiskSource.open(str(path), ("/",)) as source:
            theirs, specs = source.document(), dict(source.specs)
    except LiveweightsError as error:
        return Against(url, version, replica, NOT_COMPARED, "none", error.failures, ())
    found = compare(theirs, ours or ModelDocument(), allowed, most=None)
    live = _live_specs(client, fleet.manifest_digest)
    faults = _tensors(specs, live) if live is not None else ()
    warnings = found.warnings
    if ours is None:
        warnings = (*warnings, "no replica of this fleet says what it runs on")
    held = "manifest" if live is not None else "none"
    return Against(url, version, replica, found.compared, held, (*found.refused, *faults), warnings)


def _live_specs(client: Client, digest: str) -> dict[str, TensorSpec] | None:
    """Of the manifest of what is live, where the fleet has one."""
    if not digest:
        return None
    try:
        tensors = client.manifest(digest)["tensors"]
    except LiveweightsError:
        return None
    return {each["name"]: TensorSpec(each["name"], each["dtype"], tuple(each["shape"])) for each in tensors}


def _tensors(found: dict[str, TensorSpec], live: dict[str, TensorSpec]) -> tuple[Failure, ...]:
    """Names and shapes. A dtype that differs may be rounded, by the policy, so it refuses nothing here."""
    failures = [Failure("tensor_missing", "the live version has it", tensor=name) for name in live if name not in found]
    for name, spec in found.items():
        other = live.get(name)
        if other is None:
            failures.append(Failure("tensor_unexpected", "the live version lacks it", tensor=name))
        elif other.shape != spec.shape:
            text = f"has shape {list(spec.shape)}, the live version {list(other.shape)}"
            failures.append(Failure("tensor_shape", text, tensor=name))
    return tuple(failures)


def show(found: Against) -> None:
    out = views.out
    parts = wire.plain(found.compared) | {"tensors": found.tensors}
    rows = [(name, "not compared" if held == "none" else "compared") for name, held in parts.items()]
    title = f"against {found.version or 'no version'} of {found.url}"
    out.print(views.table(title, ("what", "held against the fleet"), rows))
    for warning in found.warnings:
        out.print(f"warning: {warning}", style="yellow", markup=False)
    if found.refused:
        faults = [(each.code, each.file, each.tensor, each.message) for each in found.refused[:SHOWN]]
        out.print(views.table(f"{len(found.refused)} refusals", ("code", "file", "tensor", "what"), faults))
