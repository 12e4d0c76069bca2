"""A placement is proved by replay for one spelling of the checkpoint's names: the one that the engine started on.

Other names, another order and redundant copies are the same spelling. A tensor that holds what the proved spelling had
in several, or several for one, may lie in more than one way: then the engine's own loader has to be one that was tried
with it, or the publication, the fleet or the manifest has to say how it lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from engine_adapter.placement.fusion import Fusion, FusionError, fusion_of
from engine_adapter.placement.rows import CopyRow, Placement
from updater.core.errors import Failure, Rejected
from updater.core.policy import SourceLayout
from updater.protocol.manifest import TensorSpec

#: (glob of source names, how they lie): what a publication, a fleet or a manifest says.
Layouts = Sequence[tuple[str, str]]
_AS_IT_LIES = (SourceLayout.CONCATENATED, SourceLayout.STACKED)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert
_HINT = 'say how it lies: layouts={{"{}": "{}"}} or another of {} (--layout, or in the manifest)'


@dataclass(frozen=True, slots=True)
class Stated:
    """How one source lies, and the pattern that says so."""

    kind: SourceLayout
    glob: str


@dataclass(frozen=True, slots=True)
class Proved:
    """The spelling whose replay gave the live bytes. `stated`: what its manifest said of its layouts."""

    specs: Mapping[str, TensorSpec]
    placement: Placement
    stated: Mapping[str, Stated] = field(default_factory=dict)


def stated_layouts(names: Iterable[str], asked: Layouts, manifest: Layouts) -> dict[str, Stated]:
    """By source name. In each list the first pattern that matches counts. Raises Rejected where the two disagree."""
    found: dict[str, Stated] = {}
    failures = []
    if not asked and not manifest:
        return found
    for name in names:
        one, other = _first(name, asked), _first(name, manifest)
        if one is not None and other is not None and one.kind is not other.kind:
            why = f"the manifest says {other.kind.value}, the publication or the fleet {one.kind.value}"
            failures.append(Failure("layout_unproved", why, tensor=name, hint="let them say the same, or one of them"))
        said = one or other
        if said is not None:
            found[name] = said
    if failures:
        raise Rejected(*failures)
    return found


def _first(name: str, layouts: Layouts) -> Stated | None:
    return next((Stated(SourceLayout(kind), glob) for glob, kind in layouts if fnmatchcase(name, glob)), None)


def shown(specs: Mapping[str, TensorSpec], stated: Mapping[str, Stated]) -> dict[str, TensorSpec]:
    """The specs as an engine's loader is asked about them: what lies transposed is shown the way round it knows."""
    return {
        name: replace(spec, shape=(*spec.shape[:-2], spec.shape[-1], spec.shape[-2]))
        if len(spec.shape) > 2 and name in stated and stated[name].kind is SourceLayout.STACKED_TRANSPOSED
        else spec
        for name, spec in specs.items()
    }


def respelled(
    proved: Proved, specs: Mapping[str, TensorSpec], placement: Placement, stated: Mapping[str, Stated]
) -> tuple[Placement, tuple[str, ...]]:
    """The placement of another spelling, and what was taken as stated, for the receipt.

    `placement`: the engine's own of these specs; used as it is where the spelling is proved or its loader was tried.
    Raises Rejected: `layout_unproved`, for every source that nothing says enough about.
    """
    return _Respelling(proved, specs, placement, stated).run()


@dataclass(slots=True)
class _Respelling:
    proved: Proved
    specs: Mapping[str, TensorSpec]
    placement: Placement
    stated: Mapping[str, Stated]
    failures: list[Failure] = field(default_factory=list)
    taken: dict[str, Stated] = field(default_factory=dict)
    rows: dict[str, list[CopyRow]] = field(default_factory=dict)  # by the source whose own rows they replace

    def run(self) -> tuple[Placement, tuple[str, ...]]:
        holds, parted = self._differences()
        for whole, parts in holds.items():
            self._fused(whole, parts)
        for whole, parts in parted.items():
            self._split(whole, parts)
        for name in self.stated.keys() - self.taken.keys() - self.rows.keys() if self.stated else ():
            self._as_proved(name, holds, parted)
        if self.failures:
            raise Rejected(*sorted(self.failures, key=lambda failure: failure.tensor))
        if not self.rows:
            return self.placement, self._words()
        kept = [row for row in self.placement.rows if not isinstance(row, CopyRow) or row.source not in self.rows]
        made = [row for rows in self.rows.values() for row in rows]
        made.sort(key=lambda row: (row.target, row.target_box.start))  # `source_boxes` looks at neighbours
        return replace(self.placement, rows=(*kept, *made)), self._words()

    def _words(self) -> tuple[str, ...]:
        counts: dict[Stated, int] = {}
        for said in self.taken.values():
            counts[said] = counts.get(said, 0) + 1
        return tuple(f"layout taken as stated: {s.glob} is {s.kind.value} ({n} tensors)" for s, n in counts.items())

    # what differs

    def _differences(self) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """(source -> proved sources that it holds, proved source -> sources that it is split into)."""
        holds: dict[str, set[str]] = {}
        parted: dict[str, set[str]] = {}
        if _same_shapes(self.specs, self.proved.specs):
            return holds, parted
        for new, old in self._partners():
            here, there = self.specs[new].numel, self.proved.specs[old].numel
            if here > there:
                holds.setdefault(new, set()).add(old)
            elif here < there:
                parted.setdefault(old, set()).add(new)
        return holds, parted

    def _partners(self) -> set[tuple[str, str]]:
        """(source, proved source) that write the same elements, where they are not the same rows."""
        before: dict[str, dict[object, list[CopyRow]]] = {}
        for old in _copies(self.proved.placement):
            before.setdefault(old.target, {}).setdefault(old.target_box, []).append(old)
        found: set[tuple[str, str]] = set()
        for row in _copies(self.placement):
            boxes = before.get(row.target, {})
            exact = boxes.get(row.target_box)
            if exact is None:
                exact = [old for rows in boxes.values() for old in rows if old.target_box.meet(row.target_box)]
            found |= {(row.source, old.source) for old in exact}
        return found

    # what is done about it

    def _fused(self, whole: str, parts: set[str]) -> None:
        if whole in self.placement.tested:
            return
        said = self._said([whole], "holds in one tensor what the proved spelling has in several", parts)
        if said is None:
            return
        before = [row for row in _copies(self.proved.placement) if row.source in parts]
        specs = {name: self.proved.specs[name] for name in parts}
        fusion = self._fusion(said, whole, self.specs[whole], specs, before)
        if fusion is not None:
            self.taken[whole] = said
            self.rows[whole] = [row for old in before for row in fusion.fused(old)]

    def _split(self, whole: str, parts: set[str]) -> None:
        if parts <= self.placement.tested:
            return
        said = self._said(sorted(parts), "is part of what the proved spelling has in one tensor", {whole})
        if said is None:
            return
        name = min(parts)
        if said.kind not in _AS_IT_LIES:
            why = f"{said.kind.value}: the proved {whole} has its parts one after the other"
            self.failures.append(Failure("layout_unproved", why, tensor=name))
            return
        specs = {part: self.specs[part] for part in parts}
        after = [row for row in _copies(self.placement) if row.source in parts]
        fusion = self._fusion(said, name, replace(self.proved.specs[whole], name=whole), specs, after)
        if fusion is None:
            return
        made = [row for old in _copies(self.proved.placement) if old.source == whole for row in fusion.split(old)]
        for part in parts:
            self.taken[part] = said
            self.rows[part] = [row for row in made if row.source == part]

    def _said(self, names: Sequence[str], why: str, others: set[str]) -> Stated | None:
        """What is stated of all of them alike; else a failure for each that nothing is said of."""
        first = self.stated.get(names[0])
        if first is not None and all(self.stated.get(name) == first for name in names):
            return first
        near = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
        stacked = len(self.specs[names[0]].shape) > 2 or any(len(self._shape(each)) > 2 for each in others)
        likely = SourceLayout.STACKED if stacked else SourceLayout.CONCATENATED
        kinds = ", ".join(kind.value for kind in SourceLayout)
        for name in names:
            hint = _HINT.format(_NUMBER.sub("*", name), likely.value, kinds)
            self.failures.append(Failure("layout_unproved", f"{why} ({near})", tensor=name, hint=hint))
        return None

    def _shape(self, old: str) -> tuple[int, ...]:
        return self.proved.specs[old].shape

    def _fusion(
        self, said: Stated, blamed: str, whole: TensorSpec, parts: Mapping[str, TensorSpec], rows: Sequence[CopyRow]
    ) -> Fusion | None:
        order: dict[str, int] = {}
        if len({row.target for row in rows}) == 1:
            for row in rows:
                order[row.source] = min(order.get(row.source, row.target_box.start[0]), row.target_box.start[0])
        try:
            return fusion_of(said.kind, whole, parts, order, self.placement.kv_heads)
        except FusionError as error:
            why = f"stated as {said.kind.value} ({said.glob}), but {error}"
            self.failures.append(Failure("layout_unproved", why, tensor=blamed))
            return None

    def _as_proved(self, name: str, *different: Mapping[str, set[str]]) -> None:
        """A tensor of the proved spelling lies as it lay when that was proved: nothing can be said against it."""
        said = self.stated[name]
        loaded = any(name in each or any(name in parts for parts in each.values()) for each in different)
        if loaded or name not in self.placement.loaded or said.kind in _AS_IT_LIES:
            return
        if self.proved.stated.get(name, said).kind is said.kind and name in self.proved.stated:
            return
        why = f"stated as {said.kind.value} ({said.glob}), but the proved spelling has it under one name as well"
        hint = "leave it out of layouts, or start the engine on parts"
        self.failures.append(Failure("layout_unproved", why, tensor=name, hint=hint))


def _same_shapes(one: Mapping[str, TensorSpec], other: Mapping[str, TensorSpec]) -> bool:
    return one.keys() == other.keys() and all(spec.shape == other[name].shape for name, spec in one.items())


def _copies(placement: Placement) -> Iterator[CopyRow]:
    return (row for row in placement.rows if isinstance(row, CopyRow) and row.target_box.numel)
