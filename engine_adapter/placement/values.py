"""What a front and its ranks say to each other of source tensors and their regions: plain values, sent as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from transports.base import Box


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A source tensor as planned. `digest` from the manifest, or empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class SourceBoxes:
    """The distinct regions of one source tensor that this rank holds."""

    name: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class TensorCuts:
    """Cut points of one source tensor per dimension, ends included: the atoms are the cells of this grid."""

    name: str
    cuts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AtomDigest:
    """Digest of one cell in the coordinates of the whole source tensor: additive over disjoint cells, mod 2^64."""

    name: str
    box: Box
    digest: str  # 16 hex digits


@dataclass(frozen=True, slots=True)
class BlankTensor:
    """A source tensor without a normal number in this rank's part. `live_normal`: whether the live part has one."""

    name: str
    live_normal: bool


@dataclass(frozen=True, slots=True)
class RankVerifyReply:
    """What a rank found in its spare. `changed`: names of parameters that differ from live. `zero`: names that are all
    zero. `blank`: see `placement.suspicious`.
    """

    atoms: tuple[AtomDigest, ...]
    parameters: int
    changed: tuple[str, ...]
    zero: tuple[str, ...]
    blank: tuple[BlankTensor, ...] = ()
