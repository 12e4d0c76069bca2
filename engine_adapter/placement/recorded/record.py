"""Placement recorded from an engine's own loader, run over meta tensors on a private twin of the model.

`load_weights` says by what it does where checkpoint tensors go: prefixes, fused projections, replicated heads, padded
vocabularies, stacked experts. Plain copies are read off their views; parameters that the loader fills through
temporaries are traced by coordinates; what it computes is refused, by the name of the parameter.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from engine_adapter.placement.boxes import first_overlap
from engine_adapter.placement.declared.names import nearest
from engine_adapter.placement.recorded.regions import Holes, drop_ties, ignored_ties, lone_ties
from engine_adapter.placement.recorded.traced import trace
from engine_adapter.placement.recorded.twin import LOADER_ERRORS, Twin, meta_tensors
from engine_adapter.placement.recorded.writes import Unread, WriteLog
from engine_adapter.placement.rows import CopyRow, Placement, Row
from transports.dtypes import TORCH_DTYPES, is_packed
from updater.core.errors import Failure, Rejected
from updater.protocol.manifest import TensorSpec

#: Names that are looked for one by one when a loader raises.
_MOST_CULPRITS = 50
#: Of these many, those are let off that the loader refuses only without the rest (a tied head without its embedding).
_FEW = 4

IGNORED = "the engine's loader took it and loaded nothing"
#: Names that checkpoints may carry although no model keeps them: tables that are computed.
STRAY = ("*rotary*.inv_freq*", "*rotary*.cos_cached*", "*rotary*.sin_cached*")
#: (glob of checkpoint names, what is appended to the message when such a name is missing).
HINTS = (("*lm_head.weight", "config.json says tie_word_embeddings is false"),)


@dataclass(frozen=True, slots=True)
class Recording:
    """One run of a loader. `rows` in the order of the writes; `reached`: sources that arrived in a parameter.

    `error`: what the loader raised, or empty.
    """

    rows: tuple[Row, ...]
    unread: tuple[Unread, ...]
    reached: frozenset[str]
    error: str


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """The checkpoint that the engine started on, and its placement: what later ones are measured against."""

    specs: Mapping[str, TensorSpec]
    placement: Placement


def record(twin: Twin, specs: Mapping[str, TensorSpec]) -> Recording:
    """Run the loader over meta tensors. Every dtype must be one of torch's. The twin is as before afterwards.

    Raises `Rejected` only where the loader would write outside its model.
    """
    sources = meta_tensors(specs)
    error = ""
    with twin.restored() as replaced, torch.no_grad():
        log = WriteLog(sources, twin.tensors)
        with log:
            try:
                twin.load(iter(sources.items()))
            except LOADER_ERRORS as raised:
                error = _said(raised)
    rebound = [Unread(name, why) for name, why in replaced.items()]
    return Recording(tuple(log.rows), (*log.unread, *rebound), frozenset(log.reached), error)


def place(
    twin: Twin, specs: Mapping[str, TensorSpec], rank: int, size: int, start: StartCheckpoint | None = None
) -> Placement:
    """Rows of this rank. Without `start`, `specs` are those of the checkpoint that the engine started on.

    Regions that the starting checkpoint left alone are carried over; with `start`, whatever else is left uncovered is
    a missing tensor. Raises `Rejected` with every failure: names, shapes, parameters that cannot be read off.
    """
    return _Placing(twin, specs, rank, size, start).run()


class _Placing:
    def __init__(
        self, twin: Twin, specs: Mapping[str, TensorSpec], rank: int, size: int, start: StartCheckpoint | None
    ) -> None:
        self.twin, self.specs, self.rank, self.size, self.start = twin, specs, rank, size, start
        self.fine = dict(specs)  # what the loader does not choke on
        self.failures: list[Failure] = []

    def run(self) -> Placement:
        self._check_tensors()
        recording = self._record()
        rows, redundant = drop_ties(recording.rows, self.twin.tensors, self.specs)
        ordered = self._resolve(rows, recording.unread)
        redundant |= ignored_ties(set(self.specs) - recording.reached, ordered, self.twin.tensors, self.specs)
        holes = Holes.of(ordered, self.twin.tensors)
        self._report_missing(holes)
        unused = set(self.fine) - recording.reached - set(redundant)
        self._report_strays(unused)
        if self.failures:
            raise self._rejected(len(recording.reached))
        carried = holes.carried(None if self.start is None else self.start.placement)
        return Placement(
            rank=self.rank,
            size=self.size,
            rows=(*ordered, *carried),
            loaded=recording.reached - set(redundant),
            ignored=tuple((name, IGNORED) for name in sorted(unused)),
            redundant=tuple(sorted(redundant.items())),
            tied=lone_ties(ordered, self.twin.tensors),
        )

    def _fail(self, code: str, why: str, tensor: str) -> None:
        self.failures.append(Failure(code, why, rank=self.rank, tensor=tensor))

    def _rejected(self, matched: int) -> Rejected:
        """Everything that is wrong; the first unexpected name says how many others were known."""
        told = False
        failures = []
        for failure in self.failures:
            if failure.code == "tensor_unexpected" and not told:
                counts = f"; {matched} of {len(self.specs)} names matched"
                failure, told = replace(failure, message=failure.message + counts), True
            failures.append(failure.at(rank=self.rank))
        return Rejected(*failures)

    def _check_tensors(self) -> None:
        for name, spec in self.specs.items():
            if spec.dtype not in TORCH_DTYPES or is_packed(spec.dtype):
                self._fail("tensor_dtype", f"{spec.dtype} cannot be handed to the engine's loader", name)
        for name in self.twin.lazy:
            self._fail("placement_refused", "a parameter that only its loader gives a shape", name)
        if self.failures:
            raise Rejected(*self.failures)

    # names

    def _record(self) -> Recording:
        """Of all tensors that the loader does not choke on; the others are reported."""
        recording = record(self.twin, self.specs)
        if not recording.error:
            return recording
        culprits = self._culprits()
        for name, error in culprits.items():
            self._blame(name, error)
        self.fine = {name: spec for name, spec in self.specs.items() if name not in culprits}
        rest = record(self.twin, self.fine)
        if rest.error and not culprits:
            self._fail("placement_refused", f"the engine's loader fails: {rest.error}", "")
        if rest.error or len(culprits) >= _MOST_CULPRITS:
            raise self._rejected(len(rest.reached))
        return rest

    def _culprits(self) -> dict[str, str]:
        """Names that make the loader raise, and what it raises."""
        alone: dict[str, str] = {}
        self._halve(list(self.specs), alone)
        rest = {name: spec for name, spec in self.specs.items() if name not in alone}
        if len(alone) > _FEW or record(self.twin, rest).error:
            return alone
        return {
            name: error
            for name, error in alone.items()
            if record(self.twin, {n: s for n, s in self.specs.items() if n == name or n in rest}).error
        }

    def _halve(self, names: list[str], found: dict[str, str]) -> None:
        if not names or len(found) >= _MOST_CULPRITS:
            return
        recording = record(self.twin, {name: self.specs[name] for name in names})
        if not recording.error:
            return
        if len(names) == 1:
            found[names[0]] = recording.error
            return
        middle = len(names) // 2
        self._halve(names[:middle], found)
        self._halve(names[middle:], found)

    def _blame(self, name: str, error: str) -> None:
        known = None if self.start is None else self.start.specs.get(name)
        if known is not None and known.shape != self.specs[name].shape:
            shapes = f"{list(self.specs[name].shape)} instead of {list(known.shape)}"
            self._fail("tensor_shape", f"shape {shapes}: {_first_line(error)}", name)
        elif known is not None or self.start is None:
            why = f"the engine's loader fails over shape {list(self.specs[name].shape)}: {_first_line(error)}"
            self._fail("placement_refused", why, name)
        else:
            near = nearest(name, [other for other in self.start.specs if other not in self.specs])
            hint = f"; nearest: {', '.join(near)}" if near else ""
            why = f"the engine's loader does not know this name ({_first_line(error)}){hint}"
            self._fail("tensor_unexpected", why, name)

    # parameters that are not plain copies

    def _resolve(self, rows: list[Row], unread: Iterable[Unread]) -> list[Row]:
        """`rows` with those of unreadable parameters replaced by traced ones, where these exist."""
        fed: dict[str, set[str]] = {each.target: set() for each in unread}
        for each in unread:
            fed[each.target] |= each.sources
        for target in _written_twice(rows):
            if target not in fed:
                self._fail("placement_refused", "the loader copies several tensors over one region", target)
        for row in rows:
            if isinstance(row, CopyRow) and row.target in fed:
                fed[row.target].add(row.source)
        why = {each.target: each.why for each in unread}
        kept = [row for row in rows if row.target not in fed]
        for targets, sources in _groups(fed):
            kept += self._trace(targets, sources, why)
        return kept

    def _trace(self, targets: list[str], sources: set[str], why: Mapping[str, str]) -> list[Row]:
        if not sources:
            for target in targets:
                self._fail("placement_refused", why[target], target)
            return []
        try:
            return trace(self.twin, self.fine, sources, targets)
        except Rejected as error:
            for failure in error.failures:
                first = why.get(failure.tensor)
                self._fail(failure.code, f"{first}; {failure.message}" if first else failure.message, failure.tensor)
            return []

    # what is covered

    def _report_missing(self, holes: Holes) -> None:
        """Sources that the start's placement copied to a region that is now uncovered."""
        if self.start is None:
            return
        found: dict[str, str] = {}
        for row in self.start.placement.rows:
            if isinstance(row, CopyRow) and row.source not in self.specs and holes.meet(row.target, row.target_box):
                found.setdefault(row.source, row.target)
        for name, target in found.items():
            hint = next((f"; {text}" for glob, text in HINTS if fnmatchcase(name, glob)), "")
            self._fail("tensor_missing", f"needed for {target}{hint}", name)

    def _report_strays(self, unused: set[str]) -> None:
        """What the loader passed over in silence, unless the starting checkpoint had it too or any may have it: a
        loader that drops an expert too many would drop a misspelt one as well."""
        if self.start is None:
            return
        known = {name for name, _ in self.start.placement.ignored}
        for name in sorted(unused - known):
            if not any(fnmatchcase(name, glob) for glob in STRAY):
                near = nearest(name, [other for other in self.start.specs if other not in self.specs])
                self._fail("tensor_unexpected", IGNORED + (f"; nearest: {', '.join(near)}" if near else ""), name)


def _written_twice(rows: Iterable[Row]) -> list[str]:
    boxes: dict[str, list[CopyRow]] = {}
    for row in rows:
        if isinstance(row, CopyRow):
            boxes.setdefault(row.target, []).append(row)
    return [name for name, held in boxes.items() if first_overlap([row.target_box for row in held]) is not None]


def _groups(fed: Mapping[str, set[str]]) -> list[tuple[list[str], set[str]]]:
    """Parameters that share sources are read together."""
    groups: list[tuple[list[str], set[str]]] = []
    for target, sources in fed.items():
        joined: tuple[list[str], set[str]] = ([target], set(sources))
        apart = []
        for group in groups:
            if group[1] & sources:
                joined = (group[0] + joined[0], group[1] | joined[1])
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups


def _said(error: Exception) -> str:
    """A loader's bare assertion says nothing: then what it asserted."""
    text = str(error).strip()
    if not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} (in {frame.name})"
    return f"{type(error).__name__}: {text}"


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 200 else line[:200] + "..."
