"""From a client's request to the machine's event: ids, versions, paths and manifests, checked before all else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from updater.coordinator.journal.journal import canonical
from updater.coordinator.sources import UNSEEN, SourceSeen, changed, seen
from updater.core.errors import Rejected, refuse
from updater.core.fleet.begin import wanted_version
from updater.core.fleet.events import Begin
from updater.core.fleet.state import Fleet
from updater.core.participant import STREAMS, DiskOffer, Kind, Offer, StreamOffer
from updater.core.policy import OnBusy, Policy, conflict
from updater.core.version import START, Version
from updater.protocol import wire
from updater.protocol.answers import Receipt
from updater.protocol.api import PolicyBody, RollbackRequest, RunStep, UpdateRequest
from updater.protocol.manifest import Manifest, real_path


@dataclass(frozen=True, slots=True)
class Before:
    """An id that was used before. `receipt`: None while it runs. `source`: what it read, as it looked then."""

    body_hash: str
    receipt: Receipt | None = None
    source: SourceSeen = UNSEEN


#: What the policy of a rollback may say: how it pauses and commits. The rest is about tensors that come in.
ROLLBACK_POLICY = frozenset(
    {"in_flight", "cache", "on_busy", "commit", "deadline_s", "quiesce_s", "pause_lease_s", "attempts"}
)
#: None: this id was not used before.
Known = Callable[[str], Before | None]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request. `body`: canonical JSON that the hash is of; `lease_s`: None where the client named none.

    `source`: what it reads, as it looks now. Of a request that was made before neither this nor its offer is looked at:
    the folder may have been pruned since, and the receipt is due all the same (I7).
    """

    event: Begin
    version: str
    body: str
    lease_s: float | None
    source: SourceSeen = UNSEEN


def asked_update(
    request: UpdateRequest,
    state: Fleet,
    roots: tuple[Path, ...],
    uploaded: Callable[[str], str | None],
    known: Known,
    extended: Callable[[Policy], Policy] = lambda policy: policy,
) -> ParsedRequest:
    """Raises Rejected. `uploaded`: text of a manifest by its digest. `extended`: a policy and what the fleet allows."""
    if request.adapter is not None:
        raise refuse("adapter_unsupported", "adapters cannot be published yet")
    policy = extended(_policy(request.policy))
    if request.dry_run:
        _check_dry_run(request, policy)
    run, step = _version(request)
    body, body_hash = _hashed(Kind.UPDATE, request)
    event = Begin(
        update=request.id or "",
        body_hash=body_hash,
        step=step,
        run=run,
        base=_label(request.base_version, "base_version") if request.base_version is not None else None,
        policy=policy,
        dry_run=request.dry_run,
    )
    version = str(wanted_version(state, event))
    if request.id is None and request.dry_run:
        event = replace(event, update=_unused(f"dry-run-{state.serial + 1}", known))
    elif request.id is None:
        live = str(state.live.label.version) if state.live is not None else ""
        event = _named(event, version, known, live, lambda: _looks(request, roots))
    if known(event.update) is not None:
        return ParsedRequest(event, version, body, request.lease_s)
    offer = _offer(request, roots)
    source = seen(offer.path) if isinstance(offer, DiskOffer) else UNSEEN
    event = replace(event, offer=offer, manifest=_manifest(request.manifest, uploaded))
    return ParsedRequest(event, version, body, request.lease_s, source)


def _check_dry_run(request: UpdateRequest, policy: Policy) -> None:
    if request.transport != "disk":
        text = "a dry run looks at a source on disk; what a stream brings is planned when it begins"
        raise refuse("mode_unsupported", text, hint="name the path of a folder")
    if policy.on_busy is OnBusy.SUPERSEDE:
        raise refuse("mode_unsupported", "a dry run takes the place of no update", hint="on_busy=wait")


def _unused(name: str, known: Known) -> str:
    found, number = name, 1
    while known(found) is not None:
        number += 1
        found = f"{name}.{number}"
    return found


def _looks(request: UpdateRequest, roots: tuple[Path, ...]) -> SourceSeen:
    """Of what the request names, now. Gone or out of reach: nothing is seen."""
    if request.transport != "disk":
        return UNSEEN
    try:
        return seen(resolved(request.disk_path, roots))
    except Rejected:
        return UNSEEN


def _offer(request: UpdateRequest, roots: tuple[Path, ...]) -> Offer:
    source, kind = request.source, request.transport
    if source is None or kind == "disk":
        return DiskOffer(resolved(request.disk_path, roots))
    if kind not in STREAMS:
        known = ", ".join(("disk", *STREAMS))
        raise refuse("transport_unsupported", f"transport {kind!r} is not one of {known}")
    if not source.address or not source.session or source.path:
        raise refuse("bad_request", f"a {kind} source has an address and a session, and no path")
    if request.manifest is None:
        raise refuse("manifest_required", f"a {kind} update has to say in a manifest what will come")
    return wire.build(StreamOffer, {"kind": kind, "address": source.address, "session": source.session})


def asked_rollback(request: RollbackRequest, serial: int) -> ParsedRequest:
    """Raises Rejected. Without an id of its own every call is another rollback: a repeat fails on `expected_live`."""
    usual = PolicyBody()
    foreign = sorted(
        name
        for name in request.policy.model_fields_set - ROLLBACK_POLICY
        if getattr(request.policy, name) != getattr(usual, name)
    )
    if foreign:
        raise refuse(
            "mode_unsupported",
            f"a rollback reads nothing and stages nothing: {', '.join(foreign)} cannot be asked of it",
            hint=f"a rollback takes {', '.join(sorted(ROLLBACK_POLICY))}",
        )
    body, body_hash = _hashed(Kind.ROLLBACK, request)
    event = Begin(
        update=request.id or f"rollback-{request.target}-{serial + 1}",
        body_hash=body_hash,
        kind=Kind.ROLLBACK,
        target=_label(request.target, "target"),
        expected=_label(request.expected_live, "expected_live"),
        policy=_policy(request.policy),
    )
    return ParsedRequest(event, request.target, body, None)


def _policy(body: PolicyBody) -> Policy:
    plain = body.model_dump(mode="json")
    policy = wire.build(Policy, {**plain, "layouts": list(plain["layouts"].items())})
    problem = conflict(policy)
    if problem is not None:
        raise refuse("mode_unsupported", problem)
    return policy


def _version(request: UpdateRequest) -> tuple[int | None, int | None]:
    """(run or None for the current one, step or None for the next one)."""
    asked = request.version
    if asked is None:
        return None, None
    if isinstance(asked, RunStep):
        return asked.run, asked.step
    if isinstance(asked, str):
        version = _label(asked, "version")
        if version == START:
            raise refuse("bad_request", "version: start cannot be published")
        return version.run, version.step
    if not 0 <= asked < 10**18:
        raise refuse("bad_request", f"version: step {str(asked)[:40]} is not in [0, 10**18)")
    return None, asked


def _label(text: str, field: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as error:
        raise refuse("bad_request", f"{field}: {error}") from None


#: Fields of a policy that came after 0.1.0. Where they say nothing they are left out, so that a request of before an
#: upgrade is still the same one.
_LATER = ("allow_suspicious", "layouts", "require_config", "allow_config")


def _hashed(kind: Kind, request: UpdateRequest | RollbackRequest) -> tuple[str, str]:
    """The request without its id, in one form for all spellings of it, and the SHA-256 of that."""
    plain: dict[str, Any] = request.model_dump(mode="json", exclude={"id"})
    for name in ("dtypes", "dry_run"):
        if not plain.get(name):  # the same body as before there were any
            plain.pop(name, None)
    for name in _LATER:
        if not plain["policy"][name]:
            del plain["policy"][name]
    if isinstance(request, UpdateRequest) and request.transport == "disk":
        plain |= {"path": None, "source": {"kind": "disk", "path": request.disk_path}}
    body = canonical({"kind": kind.value, **plain})
    return body, hashlib.sha256(body.encode()).hexdigest()


def _named(event: Begin, label: str, known: Known, live: str, looks: Callable[[], SourceSeen]) -> Begin:
    """The default id: `run-step`. It repeats what runs, or what was committed and is live by the same body and from a
    source that was not seen to change. Otherwise the next free of `run-step.2`, ...: after a try that failed the
    version may be published yet; after a rollback it may not, and the machine says so, where the old receipt would
    mislead.

    Raises `stale_version` for a source that has changed: the receipt would say of the new bytes that they are live.
    """
    name, number = label, 1
    while True:
        before = known(name)
        if before is None or before.receipt is None:
            return replace(event, update=name)
        if before.receipt.outcome == "committed" and label == live and before.body_hash == event.body_hash:
            file = changed(before.source, looks())
            if file:
                text = f"{label} is live, and its source is not what it was when it was published"
                raise refuse("stale_version", text, file=file, hint="publish it as the next step")
            return replace(event, update=name)
        number += 1
        name = f"{label}.{number}"


def resolved(path: str, roots: tuple[Path, ...]) -> str:
    """The real path, links followed. Nothing is opened; it must lie under a root before anybody asks if it exists."""
    if "\0" in path or not os.path.isabs(path):
        raise refuse("source_outside_roots", "a source path must be absolute", file=path[:300].replace("\0", "?"))
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root) for root in roots):
        raise refuse("source_outside_roots", "the path does not lie under a configured root", file=path)
    if not real.exists():
        raise refuse("source_missing", "nothing lies there", file=path)
    return real_path(path)


def _manifest(given: dict[str, Any] | str | None, uploaded: Callable[[str], str | None]) -> str:
    """The canonical text, or empty where the request brings none."""
    if given is None:
        return ""
    if isinstance(given, str):
        text = uploaded(given)
        if text is None:
            raise refuse("manifest_invalid", f"no manifest {given} was uploaded")
        return text
    return checked_manifest(canonical(given)).to_json()


def sealed_manifest(text: str, digests: Mapping[str, str]) -> Manifest:
    """The manifest of a stream with the digests that came at its end. Raises `manifest_invalid`."""
    manifest = checked_manifest(text)
    unknown = sorted(set(digests) - {entry.name for entry in manifest.tensors})
    if unknown:
        raise refuse("manifest_invalid", "a digest for a tensor that the manifest does not list", tensor=unknown[0])
    entries = []
    for entry in manifest.tensors:
        digest = digests.get(entry.name, entry.digest)
        if entry.digest and digest != entry.digest:
            why = f"promised {entry.digest}, sealed {digest}"
            raise refuse("manifest_mismatch", why, tensor=entry.name)
        entries.append(replace(entry, digest=digest))
    return replace(manifest, tensors=tuple(entries))


def checked_manifest(text: str | bytes) -> Manifest:
    """Raises `manifest_invalid`."""
    try:
        return Manifest.from_json(text)
    except wire.WireError as error:
        raise refuse("manifest_invalid", f"{error.where}: {error.why}") from None
