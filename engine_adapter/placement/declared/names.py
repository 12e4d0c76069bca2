"""From the name of a checkpoint tensor to a parameter and a part of it: six kinds of rule, in a fixed order.

The order and the meaning of the kinds are those of vLLM's weights mapper, so that its tables can be written down as
they are: renaming, regex, substring, stacked, prefix, suffix; every rule of a kind is tried in turn, not only the
first that hits; of the stacked rules the last hit wins, and all of them look at the name as it was before any of
them rewrote it (otherwise `.gate_up_proj` would be hit by `up_proj`). A target of None drops the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache

#: Tables that some exporters write out and no engine loads.
ROTARY_TABLES = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")


@dataclass(frozen=True, slots=True)
class Shard:
    """Which piece of a parameter a tensor feeds. `part`: `q`, `gate`, ... or empty for all parts in one tensor.

    `expert`: index of the one expert in it, or None for all of them (or for a parameter without experts).
    """

    part: str = ""
    expert: int | None = None


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Stacked:
    """`old` inside a name becomes `new`, and the tensor is the part `parts` of that parameter.

    `{e}` inside `old` stands for a decimal expert index. Several parts: the one tensor is each of them (aliases).
    """

    old: str
    new: str
    parts: str | tuple[str, ...] = ""

    @property
    def shards(self) -> tuple[str, ...]:
        return (self.parts,) if isinstance(self.parts, str) else self.parts


Rename = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class NameRules:
    """All pairs are (old, new). `renaming` and `regex` are regular expressions: the first kind replaces one hit.

    `ignored`: glob patterns of names that are dropped before any rule. `stray`: glob patterns of names that are
    dropped only if no parameter has the name they map to (the `.bias` that GPTQ exporters add).
    """

    renaming: tuple[Rename, ...] = ()
    regex: tuple[Rename, ...] = ()
    substring: tuple[Rename, ...] = ()
    stacked: tuple[Stacked, ...] = ()
    prefix: tuple[Rename, ...] = ()
    suffix: tuple[Rename, ...] = ()
    ignored: tuple[str, ...] = ROTARY_TABLES
    stray: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mapped:
    """`parameter` is None when a rule dropped the tensor; `dropped_by` then says which."""

    parameter: str | None
    shards: tuple[Shard, ...] = (WHOLE,)
    dropped_by: str = ""


@dataclass(slots=True)
class Mapper:
    """`NameRules` made ready: compiled once, used for every name."""

    rules: NameRules
    _stacked: list[tuple[re.Pattern[str] | None, Stacked]] = field(init=False)

    def __post_init__(self) -> None:
        self._stacked = [(_expert_pattern(rule.old), rule) for rule in self.rules.stacked]

    def map(self, name: str) -> Mapped:
        """Where a checkpoint tensor goes."""
        for pattern in self.rules.ignored:
            if fnmatchcase(name, pattern):
                return Mapped(None, (), pattern)
        key: str | None = name
        for pattern, new in self.rules.renaming:
            key = _substitute(pattern, new, key or "", count=1)
            if key is None:
                return Mapped(None, (), f"renaming {pattern}")
        for pattern, new in self.rules.regex:
            key = _substitute(pattern, new, key or "", count=0)
            if key is None:
                return Mapped(None, (), f"regex {pattern}")
        for old, new in self.rules.substring:
            if old in (key or ""):
                if new is None:
                    return Mapped(None, (), f"substring {old}")
                key = (key or "").replace(old, new, 1)
        key, shards = self._stack(key or "")
        for old, new in self.rules.prefix:
            if key.startswith(old):
                if new is None:
                    return Mapped(None, (), f"prefix {old}")
                key = new + key[len(old) :]
        for old, new in self.rules.suffix:
            if key.endswith(old):
                if new is None:
                    return Mapped(None, (), f"suffix {old}")
                key = key[: len(key) - len(old)] + new
        return Mapped(key, shards)

    def _stack(self, name: str) -> tuple[str, tuple[Shard, ...]]:
        key = name
        shards: tuple[Shard, ...] = (WHOLE,)
        for pattern, rule in self._stacked:
            if pattern is None:
                if rule.old in name:
                    key = name.replace(rule.old, rule.new, 1)
                    shards = tuple(Shard(part) for part in rule.shards)
                continue
            hit = pattern.search(name)
            if hit is not None:
                key = name[: hit.start()] + rule.new + name[hit.end() :]
                shards = tuple(Shard(part, int(hit["e"])) for part in rule.shards)
        return key, shards

    def sources(self, parameter: str, shard: Shard) -> list[str]:
        """Names that would feed this piece, likeliest first: found by undoing rules, kept only if `map` agrees.

        For messages: renamings and regular expressions are not undone.
        """
        candidates = {parameter: None}
        for undo in (self.rules.suffix, self.rules.prefix):
            candidates |= dict.fromkeys(_undone(candidates, undo, undo is self.rules.prefix))
        for rule in self.rules.stacked:
            if shard.part in rule.shards and ("{e}" in rule.old) == (shard.expert is not None):
                old = rule.old.replace("{e}", str(shard.expert))
                candidates |= {c.replace(rule.new, old, 1): None for c in list(candidates) if rule.new in c}
        for old, new in self.rules.substring:
            if new:
                candidates |= {c.replace(new, old, 1): None for c in list(candidates) if new in c}
        return [name for name in candidates if self._feeds(name, parameter, shard)]

    def _feeds(self, name: str, parameter: str, shard: Shard) -> bool:
        mapped = self.map(name)
        return mapped.parameter == parameter and shard in mapped.shards


def _undone(names: Iterable[str], rules: tuple[Rename, ...], front: bool) -> list[str]:
    result = []
    for name in list(names):
        for old, new in rules:
            if new is None:
                continue
            if front and name.startswith(new):
                result.append(old + name[len(new) :])
            elif not front and name.endswith(new):
                result.append(name[: len(name) - len(new)] + old)
    return result


@lru_cache(maxsize=4096)
def _expert_pattern(old: str) -> re.Pattern[str] | None:
    if "{e}" not in old:
        return None
    before, _, after = old.partition("{e}")
    return re.compile(re.escape(before) + r"(?P<e>\d+)" + re.escape(after))


def _substitute(pattern: str, new: str | None, name: str, count: int) -> str | None:
    if new is None:
        return None if re.search(pattern, name) else name
    return re.sub(pattern, new, name, count=count)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Known names that look like `name`, best first."""
    return get_close_matches(name, list(known), n=count, cutoff=0.6)
