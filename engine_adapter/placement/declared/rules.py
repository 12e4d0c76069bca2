"""Placement from declared rules: a pure function of (checkpoint specs, parameter shapes, rules, rank, size).

The axis of a cut is declared, never guessed from shapes: a parameter that no layout names must have exactly the shape
of its tensor. Everything that is wrong is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from engine_adapter.base import Parameter
from engine_adapter.placement.declared.cutting import Cut, rows_of
from engine_adapter.placement.declared.layouts import QKV, Experts, Layout, LayoutError, Replicated, parts_of
from engine_adapter.placement.declared.names import Mapper, NameRules, Shard, nearest
from engine_adapter.placement.rows import CarryRow, FillRow, Placement, Row
from transports.base import Box
from updater.core.errors import Failure, Rejected
from updater.protocol.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter of this rank: its local shape, and other names it goes by (ties)."""

    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """What an engine declares once for all ranks.

    `layouts`: (glob of parameter names, layout); the first that matches counts, no match means replicated.
    `carried`: globs of parameters that no checkpoint feeds: their live bytes are carried over.
    `hints`: (glob of checkpoint names, text) appended to the message when such a name is missing, for example the
    configuration flag that asks for it. `tested`: globs of parameters whose library has one way of fusing what feeds
    them, which was tried in both spellings (B054).
    """

    names: NameRules = field(default_factory=NameRules)
    layouts: tuple[tuple[str, Layout], ...] = ()
    carried: tuple[str, ...] = ()
    hints: tuple[tuple[str, str], ...] = ()
    tested: tuple[str, ...] = ()

    def layout_of(self, parameter: str) -> Layout:
        return next((layout for glob, layout in self.layouts if fnmatchcase(parameter, glob)), Replicated())

    @property
    def kv_heads(self) -> int:
        """Of all fused attention parameters; 0 where they differ or there are none."""
        found = {layout.kv_heads for _, layout in self.layouts if isinstance(layout, QKV)}
        return found.pop() if len(found) == 1 else 0


@dataclass(frozen=True, slots=True)
class Declared:
    """What `analyse` found: the placement is complete only if there are no failures."""

    placement: Placement
    failures: tuple[Failure, ...]


def targets_of(parameters: Mapping[str, Parameter]) -> dict[str, Target]:
    """The targets of an engine's parameters."""
    return {name: Target(tuple(p.local.shape), p.aliases) for name, p in parameters.items()}


def declare(
    specs: Mapping[str, TensorSpec], targets: Mapping[str, Target], rules: Rules, rank: int, size: int
) -> Placement:
    """Rows of this rank. Raises `Rejected` with every failure: names, experts, shapes."""
    found = analyse(specs, targets, rules, rank, size)
    if found.failures:
        raise Rejected(*found.failures)
    return found.placement


def analyse(
    specs: Mapping[str, TensorSpec],
    targets: Mapping[str, Target],
    rules: Rules,
    rank: int,
    size: int,
    learned: Mapping[str, Cut] | None = None,
) -> Declared:
    """The same without raising, for tools that report. `learned` comes before the rules' layouts, per parameter."""
    return _Analysis(specs, targets, rules, rank, size, learned or {}).run()


@dataclass(slots=True)
class _Analysis:
    specs: Mapping[str, TensorSpec]
    targets: Mapping[str, Target]
    rules: Rules
    rank: int
    size: int
    learned: Mapping[str, Cut]
    mapper: Mapper = field(init=False)
    failures: list[Failure] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    redundant: list[tuple[str, str]] = field(default_factory=list)
    #: parameter -> [(source, shard, the parameter name it was spelled with)]
    feeds: dict[str, list[tuple[str, Shard, str]]] = field(default_factory=dict)

    #: the first parts of every name of the source, once one is missing
    beginnings: set[tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        self.mapper = Mapper(self.rules.names)

    def run(self) -> Declared:
        self._map_names()
        for parameter in sorted(self.targets):
            self._place(parameter)
        self._report_unexpected()
        loaded = frozenset(source for feeds in self.feeds.values() for source, _, _ in feeds)
        placement = Placement(
            rank=self.rank,
            size=self.size,
            rows=tuple(self.rows),
            loaded=loaded,
            ignored=tuple(sorted(self.ignored)),
            unexpected=tuple(sorted(self.unexpected)),
            missing=tuple(sorted(self.missing)),
            redundant=tuple(sorted(self.redundant)),
            tied=self._tied(),
            tested=self._tested(),
            kv_heads=self.rules.kv_heads,
        )
        return Declared(placement, tuple(self.failures))

    def _tied(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Copies of a tie that came without the canonical tensor, and what they feed."""
        return tuple(
            sorted(
                (source, (parameter, *self.targets[parameter].aliases))
                for parameter, feeds in self.feeds.items()
                for source, _, spelled in feeds
                if parameter in self.targets and spelled in self.targets[parameter].aliases
            )
        )

    def _tested(self) -> frozenset[str]:
        return frozenset(
            source
            for parameter, feeds in self.feeds.items()
            if any(fnmatchcase(parameter, glob) for glob in self.rules.tested)
            for source, _, _ in feeds
        )

    def _fail(self, code: str, message: str, tensor: str) -> None:
        self.failures.append(Failure(code, message, rank=self.rank, tensor=tensor))

    # names

    def _map_names(self) -> None:
        owner = {alias: name for name, target in self.targets.items() for alias in target.aliases}
        for source in sorted(self.specs):
            mapped = self.mapper.map(source)
            if mapped.parameter is None:
                self.ignored.append((source, mapped.dropped_by))
                continue
            parameter = owner.get(mapped.parameter, mapped.parameter)
            if parameter not in self.targets or self._is_carried(parameter):
                stray = next((glob for glob in self.rules.names.stray if fnmatchcase(source, glob)), None)
                if stray is not None and parameter not in self.targets:
                    self.ignored.append((source, stray))
                else:
                    self.unexpected.append(source)
                continue
            for shard in mapped.shards:
                self.feeds.setdefault(parameter, []).append((source, shard, mapped.parameter))
        for parameter in list(self.feeds):
            self._set_ties_aside(parameter)

    def _is_carried(self, parameter: str) -> bool:
        return any(fnmatchcase(parameter, glob) for glob in self.rules.carried)

    def _set_ties_aside(self, parameter: str) -> None:
        """A tied copy beside the canonical tensor is redundant; alone it feeds the parameter."""
        feeds = self.feeds[parameter]
        canonical = {shard: source for source, shard, spelled in feeds if spelled == parameter}
        kept: list[tuple[str, Shard, str]] = []
        for source, shard, spelled in feeds:
            first = canonical.setdefault(shard, source)
            if spelled == parameter or first == source:
                kept.append((source, shard, spelled))
                continue
            self.redundant.append((source, first))
            mine, other = self.specs[source], self.specs[first]
            if (mine.dtype, mine.shape) != (other.dtype, other.shape):
                self._fail("tensor_shape", f"tied copy of {first} with another shape or dtype", source)
        self.feeds[parameter] = kept

    def _report_unexpected(self) -> None:
        if not self.unexpected:
            return
        known = self.missing or sorted(self.targets)
        loaded = sum(len(feeds) for feeds in self.feeds.values())
        for i, name in enumerate(self.unexpected):
            near = nearest(name, known) if i < 50 else []
            hint = f"; nearest: {', '.join(near)}" if near else ""
            total = f"; {loaded} of {len(self.specs)} names matched" if i == 0 else ""
            self._fail("tensor_unexpected", f"no rule knows this name{hint}{total}", name)

    # one parameter

    def _place(self, parameter: str) -> None:
        target = self.targets[parameter]
        cut = self.learned.get(parameter) or Cut(self.rules.layout_of(parameter), self.rank, self.size)
        if self._is_carried(parameter):
            self.rows.append(CarryRow(parameter, Box.whole(target.shape)))
            return
        feeds = self.feeds.get(parameter, [])
        if not self._complete(parameter, cut.layout, feeds):
            return
        fills: dict[FillRow, None] = {}  # once, however many tensors the parameter is made of
        copies: list[Row] = []
        for source, shard, _ in feeds:
            try:
                for row in rows_of(self.specs[source], shard, parameter, target.shape, cut):
                    if isinstance(row, FillRow):
                        fills[row] = None
                    else:
                        copies.append(row)
            except LayoutError as error:
                self._fail(error.code, f"{error} (parameter {parameter}, local shape {list(target.shape)})", source)
        self.rows += fills
        self.rows += copies

    def _complete(self, parameter: str, layout: Layout, feeds: list[tuple[str, Shard, str]]) -> bool:
        """Every slot exactly once; missing slots by the names that would fill them."""
        parts = parts_of(layout)
        count = layout.count if isinstance(layout, Experts) else None
        filled: dict[tuple[str, int | None], str] = {}
        sound = True
        for source, shard, _ in feeds:
            wrong = _misfit(shard, parts, count)
            if wrong:
                self._fail("tensor_unexpected", f"{wrong} (parameter {parameter})", source)
                sound = False
                continue
            taken = [(slot, filled[slot]) for slot in _slots(shard, parts, count) if slot in filled]
            if taken:
                slot, other = taken[0]
                self._fail("tensor_duplicate", f"feeds the same part {slot} of {parameter} as {other}", source)
                sound = False
            filled |= {slot: source for slot in _slots(shard, parts, count) if slot not in filled}
        absent = [slot for slot in _slots(Shard(), parts, count) if slot not in filled]
        self._report_missing(parameter, absent, nothing=not filled)
        return sound and not absent

    def _report_missing(self, parameter: str, absent: list[tuple[str, int | None]], nothing: bool) -> None:
        wanted: dict[str, str] = {}
        if nothing and absent:
            whole = self.mapper.sources(parameter, Shard())
            if whole and (len(absent) == 1 or not self._spelled(parameter, absent[0])):
                wanted[self._as_spelled_here(whole)] = ""
        if not wanted:
            for part, expert in absent:
                names = self._spelled(parameter, (part, expert))
                where = (f"part {part!r} of " if part else "") + (f"expert {expert} of " if expert is not None else "")
                wanted[self._as_spelled_here(names) if names else f"{parameter} ({where}it)"] = where
        for name, where in wanted.items():
            self.missing.append(name)
            hint = next((f"; {text}" for glob, text in self.rules.hints if fnmatchcase(name, glob)), "")
            self._fail("tensor_missing", f"needed for {where}{parameter}{hint}", name)

    def _as_spelled_here(self, names: list[str]) -> str:
        """Of the names that would do, the one that goes on longest like a name of this checkpoint."""
        if self.beginnings is None:
            parts = [name.split(".") for name in self.specs]
            self.beginnings = {tuple(each[:depth]) for each in parts for depth in range(1, len(each) + 1)}
        known = self.beginnings

        def shared(name: str) -> int:
            parts = tuple(name.split("."))
            return next((depth for depth in range(len(parts), 0, -1) if parts[:depth] in known), 0)

        return max(names, key=shared)

    def _spelled(self, parameter: str, slot: tuple[str, int | None]) -> list[str]:
        part, expert = slot
        shards = dict.fromkeys((Shard(part, expert), Shard(part), Shard("", expert)))
        return [
            name for shard in shards for name in self.mapper.sources(parameter, shard) if shard != Shard() or not part
        ]


def _misfit(shard: Shard, parts: tuple[str, ...], count: int | None) -> str:
    if shard.part and shard.part not in parts:
        return f"part {shard.part!r} is not one of {list(parts)}"
    if shard.expert is not None and count is None:
        return f"expert {shard.expert} of a parameter without experts"
    if shard.expert is not None and count is not None and shard.expert >= count:
        return f"expert {shard.expert} of {count}"
    return ""


def _slots(shard: Shard, parts: tuple[str, ...], count: int | None) -> Iterator[tuple[str, int | None]]:
    experts: list[int | None] = [None] if count is None else list(range(count))
    for expert in experts if shard.expert is None else [shard.expert]:
        for part in (shard.part,) if shard.part else parts:
            yield (part, expert)
