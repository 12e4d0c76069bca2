"""Atoms: the cells of a source tensor between the region borders of all ranks, and the vote that they add up to.

Copies of an atom (replicated heads, norms) must agree; each atom counts once; the sum is the tensor's digest and is
compared with the manifest's. A front uses this: no tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine_adapter.placement.boxes import Cuts, cells, cuts_of
from engine_adapter.placement.coverage import check_sources
from engine_adapter.placement.suspicious import judge, suspects
from engine_adapter.placement.values import RankVerifyReply, SourceBoxes, TensorCuts, WireTensor
from transports.base import Box
from updater.core.errors import Failure, Rejected
from updater.protocol.manifest import TensorEntry, content_digest

_MASK = (1 << 64) - 1


def make_cuts(tensors: Sequence[WireTensor], boxes: Sequence[Sequence[SourceBoxes]]) -> tuple[TensorCuts, ...]:
    """Cut points of every tensor from the regions of all ranks (`boxes[r]`: rank r's), in the order of `tensors`."""
    held: dict[str, list[Box]] = {}
    for rank in boxes:
        for each in rank:
            held.setdefault(each.name, []).extend(each.boxes)
    return tuple(TensorCuts(each.name, cuts_of(each.shape, held.get(each.name, ()))) for each in tensors)


def checked_cuts(tensors: Sequence[WireTensor], boxes: Sequence[Sequence[SourceBoxes]]) -> tuple[TensorCuts, ...]:
    """`make_cuts` of tensors that `check_sources` finds whole. Raises Rejected. Takes seconds for 100,000 tensors."""
    failures = check_sources(tensors, boxes)
    if failures:
        raise Rejected(*failures)
    return make_cuts(tensors, boxes)


@dataclass(frozen=True, slots=True)
class Combined:
    """What all ranks hold together. The vote is yes when `failures` is empty.

    `observed`: content digest in checkpoint terms (redundant tied copies left out); empty with failures of structure.
    `proof`: `digests` where every tensor was compared with the manifest's, else `structure_only`. `digests`: tensor
    name -> 16 hex digits. `changed`: number of parameters, over all ranks by name, that differ from live.
    """

    observed: str
    proof: str
    failures: tuple[Failure, ...]
    changed: int
    warnings: tuple[str, ...]
    digests: Mapping[str, str]


def combine(
    tensors: Sequence[WireTensor],
    redundant: Sequence[tuple[str, str]],
    cuts: Sequence[TensorCuts],
    replies: Sequence[RankVerifyReply],
    allow_suspicious: Sequence[str] = (),
) -> Combined:
    """`replies[r]`: the vote of rank r. `redundant`: alias -> canonical name, alias among `tensors` too.

    `allow_suspicious`: glob patterns of names that may hold no normal number.
    """
    found: dict[str, dict[Box, dict[str, list[int]]]] = {}
    for rank, reply in enumerate(replies):
        for atom in reply.atoms:
            copies = found.setdefault(atom.name, {}).setdefault(atom.box, {})
            copies.setdefault(atom.digest, []).append(rank)
    grids = {each.name: each.cuts for each in cuts}
    failures: list[Failure] = []
    digests: dict[str, str] = {}
    for tensor in tensors:
        digest, bad = _add_up(tensor, grids.get(tensor.name), found.pop(tensor.name, {}))
        failures += bad
        if digest is not None:
            digests[tensor.name] = digest
    failures += [_plain("placement_refused", name, "a rank digested a tensor that was not planned") for name in found]
    failures += _ties(redundant, digests)
    aliases = {alias for alias, _ in redundant}
    promised = {tensor.name: tensor.digest for tensor in tensors}
    refused, noted = judge(suspects(tensors, aliases, replies), promised, allow_suspicious)
    entries = [TensorEntry(t.name, t.dtype, t.shape, digests.get(t.name, "")) for t in tensors if t.name not in aliases]
    complete = len(digests) == len(tensors)
    proven = bool(tensors) and all(tensor.digest for tensor in tensors)
    return Combined(
        observed=content_digest(entries) if complete else "",
        proof="digests" if proven else "structure_only",
        failures=(*failures, *refused),
        changed=len({name for reply in replies for name in reply.changed}),
        warnings=(*_warnings(redundant, replies), *noted),
        digests=digests,
    )


def _add_up(
    tensor: WireTensor, grid: Cuts | None, atoms: Mapping[Box, Mapping[str, Sequence[int]]]
) -> tuple[str | None, list[Failure]]:
    """The tensor's digest, or None with what is wrong: no cuts, an atom that no rank or another rank holds, copies."""
    wanted = list(cells(grid)) if grid is not None else []
    if grid is None or tuple(marks[-1] for marks in grid) != tensor.shape:
        return None, [_plain("placement_refused", tensor.name, "no cuts, or cuts of another shape")]
    strange = set(atoms) - set(wanted)
    if strange:
        return None, [_plain("placement_refused", tensor.name, f"a rank digested {len(strange)} regions off the grid")]
    absent = [cell for cell in wanted if cell not in atoms]
    if absent:
        where = f"{list(absent[0].start)} to {list(absent[0].stop)}"
        return None, [_plain("tensor_unwritten", tensor.name, f"no rank digested {where} ({len(absent)} regions)")]
    differing = {cell: copies for cell, copies in atoms.items() if len(copies) > 1}
    if differing:
        return None, [_copies_differ(tensor.name, differing)]
    total = sum(int(digest, 16) for copies in atoms.values() for digest in copies) & _MASK
    observed = f"{total:016x}"
    if tensor.digest and observed != tensor.digest:
        ranks = sorted({rank for copies in atoms.values() for holders in copies.values() for rank in holders})
        why = f"holds {observed}, the manifest promises {tensor.digest}; held by ranks {ranks}"
        return observed, [Failure("tensor_digest", why, rank=ranks[0] if len(ranks) == 1 else None, tensor=tensor.name)]
    return observed, []


def _copies_differ(name: str, differing: Mapping[Box, Mapping[str, Sequence[int]]]) -> Failure:
    box, copies = next(iter(differing.items()))
    groups = " / ".join(str(sorted(set(ranks))) for ranks in copies.values())
    why = f"ranks {groups} hold different bytes of {list(box.start)} to {list(box.stop)} ({len(differing)} regions)"
    return Failure("copies_differ", why, tensor=name)


def _ties(redundant: Iterable[tuple[str, str]], digests: Mapping[str, str]) -> list[Failure]:
    return [
        _plain("tensor_digest", alias, f"tied to {canonical}, but its bytes differ")
        for alias, canonical in redundant
        if alias in digests and canonical in digests and digests[alias] != digests[canonical]
    ]


def _warnings(redundant: Sequence[tuple[str, str]], replies: Sequence[RankVerifyReply]) -> tuple[str, ...]:
    warnings = [f"redundant tied copy: {alias} equals {canonical}" for alias, canonical in redundant]
    zero = sorted({name for reply in replies for name in reply.zero})
    if zero:
        more = f" and {len(zero) - 10} more" if len(zero) > 10 else ""
        warnings.append(f"suspicious zero: all elements are zero in {', '.join(zero[:10])}{more}")
    if replies and not any(reply.changed for reply in replies):
        warnings.append("no tensor changed")
    return tuple(warnings)


def _plain(code: str, name: str, why: str) -> Failure:
    return Failure(code, why, tensor=name)
