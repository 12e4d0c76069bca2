"""The verdict over one round, from plain values alone: what was seen before, at rest, and after the next updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.bad_day.load import Heard
from tests.faults.bad_day.publisher import Answer
from updater.demo.clients import Expected
from updater.demo.clients import judge as judge_replies


@dataclass(frozen=True)
class FrontView:
    """What a front says of itself, and what the coordinator says of it (`seen_as`). `state` empty: no answer."""

    replica: str
    state: str
    version: str
    digest: str
    incarnation: str
    seen_as: str = ""


@dataclass(frozen=True)
class View:
    """The fleet at one moment. `version`, `digest`: the coordinator's."""

    version: str
    digest: str
    fronts: tuple[FrontView, ...]

    @property
    def open(self) -> tuple[FrontView, ...]:
        return tuple(front for front in self.fronts if front.state == "open")


@dataclass(frozen=True)
class Next:
    """An update after the round, with nothing in its way."""

    transport: str
    version: str
    answer: Answer | None


@dataclass(frozen=True)
class Evidence:
    """`expected`: version label -> per prompt, of everything that was ever offered. `published`: label -> digest, of
    what served. `update`: the id that the trainer gave; `answer`: what it was told, None if it died. `history`:
    id -> receipt. `allowed`: codes that this round gives a reason for. `touched`: replicas that were killed, or lost a
    rank, or were started anew. `only_coordinator`: nothing but the coordinator was at fault. `forgotten`: the
    coordinator lost its journal, or a part of it.
    """

    expected: Mapping[str, Sequence[Expected]]
    published: Mapping[str, str]
    heard: Sequence[Heard]
    margin: float
    max_tokens: int
    allowed: frozenset[str]
    update: str
    answer: Answer | None
    history: Mapping[str, Mapping[str, Any]]
    before: View
    rest: View
    end: View
    next: Sequence[Next]
    left: Sequence[str]
    touched: frozenset[str] = frozenset()
    only_coordinator: bool = False
    forgotten: bool = False


@dataclass(frozen=True)
class Verdict:
    """`faults`: (check, what is wrong). `compared`: tokens."""

    faults: tuple[tuple[str, str], ...]
    replies: int
    compared: int
    checks: tuple[str, ...] = field(default=())


def judge(found: Evidence) -> Verdict:
    named = [each.reply for each in found.heard if each.named]
    told = judge_replies(named, found.expected, margin=found.margin, max_tokens=found.max_tokens)
    faults = [("replies", fault) for fault in told.mixed]
    for check, faults_of in CHECKS.items():
        faults += [(check, fault) for fault in faults_of(found)]
    return Verdict(tuple(faults), len(named), told.compared, ("replies", *CHECKS))


def _names(found: Evidence) -> Iterator[str]:
    """A reply names a version that was published, and its digest; one that broke off says what some version says."""
    for each in found.heard:
        reply = each.reply
        where = f"{reply.replica}, prompt {reply.prompt}"
        if each.named and reply.version not in found.published:
            yield f"{where}: names {reply.version}, which was never published"
        elif each.named and each.digest != found.published[reply.version]:
            yield f"{where}: {reply.version} is {each.digest[:16]}, published as {found.published[reply.version][:16]}"
        elif not each.named and not any(_begins(each, expected, found.margin) for expected in found.expected.values()):
            yield f"{where}: broke off after {list(reply.tokens)}, which no version says"


def _begins(each: Heard, expected: Sequence[Expected], margin: float) -> bool:
    wanted = expected[each.reply.prompt]
    thin = next((step for step, gap in enumerate(wanted.margins) if gap < margin), len(wanted.margins))
    sure = min(thin, len(each.reply.tokens))
    return each.reply.tokens[:sure] == wanted.tokens[:sure]


def _one_version(found: Evidence) -> Iterator[str]:
    """All open replicas serve one version, which is the coordinator's; in the end all are open."""
    for when, view in (("at rest", found.rest), ("in the end", found.end)):
        serving = {(front.version, front.digest) for front in view.open}
        if len(serving) > 1:
            yield f"{when} the open replicas serve {sorted(serving)}"
        if serving and view.version and serving != {(view.version, view.digest)}:
            yield f"{when} the coordinator says {view.version} {view.digest[:16]}, open replicas {sorted(serving)}"
    for front in found.end.fronts:
        if front.state != "open" or front.seen_as != "open":
            yield f"in the end {front.replica} is {front.state or 'silent'}, seen as {front.seen_as or 'no member'}"


def _receipt(found: Evidence) -> Iterator[str]:
    """What the publisher was told is what the history says, and what is served follows from it."""
    told = found.answer.receipt if found.answer is not None else None
    kept = found.history.get(found.update)
    if told is not None and kept is None and not found.forgotten:
        yield f"the publisher has a receipt of {found.update} ({told['outcome']}), the history does not"
    if told is not None and kept is not None:
        for name in ("outcome", "version", "manifest_digest", "live_version"):
            if told[name] != kept[name]:
                yield f"{name}: the publisher was told {told[name]!r}, the history says {kept[name]!r}"
    known = kept if kept is not None else told
    if known is None:
        if found.update and found.rest.version != found.before.version and not found.forgotten:
            yield f"nothing is known of {found.update}, and {found.rest.version} serves, not {found.before.version}"
        return
    committed = known["outcome"] == "committed"
    wanted = known["version"] if committed else found.before.version
    if found.rest.version != wanted and not found.forgotten:
        yield f"{found.update} ended {known['outcome']}, so {wanted} must serve, and {found.rest.version} does"
    if committed:
        digests = set(known["observed"].values()) - {""}
        if len(digests) > 1:
            yield f"{found.update} was committed with the digests {sorted(digests)}"
        for front in found.rest.open:
            if digests and (front.version, front.digest) != (known["version"], min(digests)):
                yield f"{front.replica} serves {front.version}, the receipt of {found.update} says {known['version']}"


def _reasons(found: Evidence) -> Iterator[str]:
    """An update that was refused was refused for a reason that the round gives."""
    told = set(found.answer.codes) if found.answer is not None else set()
    kept = found.history.get(found.update)
    if kept is not None and kept["outcome"] != "committed":
        told |= {failure["code"] for failure in kept["failures"]} | ({kept["reason"]} - {None, ""})
    for code in sorted(told - found.allowed):
        text = found.answer.text if found.answer is not None else ""
        yield f"{code}: {text or (kept or {}).get('failures')}"


def _nothing_left(found: Evidence) -> Iterator[str]:
    yield from found.left


def _next(found: Evidence) -> Iterator[str]:
    """The next update over each transport commits, with the digests proved."""
    for each in found.next:
        answer = each.answer
        if answer is None or answer.outcome != "committed":
            yield f"over {each.transport}: {answer.text if answer is not None else 'no answer'}"
        elif answer.receipt is not None and answer.receipt["proof"] != "digests":
            yield f"over {each.transport}: proved by {answer.receipt['proof']!r}"


def _not_shut(found: Evidence) -> Iterator[str]:
    """I11: no fault of the coordinator alone shuts a replica that served a published version."""
    if not found.only_coordinator:
        return
    now = {front.replica: front for front in found.rest.fronts}
    for front in found.before.open:
        after = now.get(front.replica)
        if front.replica in found.touched or after is None:
            continue
        if after.state != "open" or after.incarnation != front.incarnation:
            yield f"{front.replica} served {front.version}, and is {after.state or 'silent'} by the coordinator alone"


CHECKS = {
    "names": _names,
    "one version": _one_version,
    "receipt": _receipt,
    "reasons": _reasons,
    "nothing left": _nothing_left,
    "next update": _next,
    "not shut": _not_shut,
}
