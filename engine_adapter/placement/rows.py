"""Placement rows as values. Ordered: where targets overlap, the last writer wins."""

from __future__ import annotations

from dataclasses import dataclass

from transports.base import Box


@dataclass(frozen=True, slots=True)
class CopyRow:
    """`source[source_box]`, permuted by `permute` if given, goes to `target[target_box]`.

    Both regions have equally many elements; they agree in row-major order once dimensions of size one are dropped.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    permute: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FillRow:
    """A constant, for example the padding rows of a vocabulary."""

    target: str
    target_box: Box
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class CarryRow:
    """A region that no checkpoint writes (frozen when the replica joined): its live bytes are carried over."""

    target: str
    target_box: Box


Row = CopyRow | FillRow | CarryRow


@dataclass(frozen=True, slots=True)
class Placement:
    """All rows of one rank for one set of checkpoint specs, and the four name sets.

    `loaded`: sources with at least one row here or on another rank; `ignored`: name -> pattern;
    `unexpected`: names that no rule knows; `missing`: sources that the rules expect and the specs lack;
    `redundant`: alias -> canonical name (a tied copy that must have the canonical digest). `tied`: source -> the
    parameters that it feeds alone, though it is called after one that is tied to another. `tested`: sources that the
    engine's own loader fuses or splits in a way that was tried; `kv_heads`: heads of keys and values, 0 if not known.
    """

    rank: int
    size: int
    rows: tuple[Row, ...]
    loaded: frozenset[str]
    ignored: tuple[tuple[str, str], ...] = ()
    unexpected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    redundant: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, tuple[str, ...]], ...] = ()
    tested: frozenset[str] = frozenset()
    kv_heads: int = 0
