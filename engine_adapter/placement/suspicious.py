"""Source tensors that arrived without one normal number, where live bytes have some: zeros that were never written, or
a file whose bytes lie in another order. Judged over all ranks together; a front uses this: no tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from engine_adapter.placement.values import RankVerifyReply, WireTensor
from updater.core.errors import Failure

_LIMIT = 100  # failures in one answer
_WHAT = "no normal number is in it, only zeros and subnormals, and the live one has some"


def suspects(tensors: Sequence[WireTensor], aliases: Collection[str], replies: Sequence[RankVerifyReply]) -> list[str]:
    """Names of which no rank that holds a part saw a normal number, and some rank's live part has one. Sorted.

    `aliases`: redundant copies, which are judged under their canonical names.
    """
    live: dict[str, bool] = {}
    for reply in replies:
        for blank in reply.blank:
            live[blank.name] = live.get(blank.name, False) or blank.live_normal
    candidates = {name for name, normal in live.items() if normal} - set(aliases)
    for reply in replies if candidates else ():
        here = {blank.name for blank in reply.blank}
        candidates -= {atom.name for atom in reply.atoms if atom.name in candidates} - here
    return sorted(candidates.intersection(each.name for each in tensors))


def judge(
    names: Iterable[str], digests: Mapping[str, str], allowed: Sequence[str]
) -> tuple[tuple[Failure, ...], tuple[str, ...]]:
    """(refusals, warnings) of suspects. `digests`: what the trainer promised, by name: such a tensor is what it meant.

    `allowed`: glob patterns of names that may look so.
    """
    failures, warnings = [], []
    for name in names:
        pattern = next((glob for glob in allowed if fnmatchcase(name, glob)), None)
        if digests.get(name):
            warnings.append(f"suspicious, but as its digest promises: {_WHAT}: {name}")
        elif pattern is not None:
            warnings.append(f"allowed although suspicious ({pattern}): {_WHAT}: {name}")
        else:
            hint = "if it is meant so, name it in allow_suspicious, or bring a manifest with digests"
            failures.append(Failure("tensor_suspicious", _WHAT, tensor=name, hint=hint))
    return tuple(failures[:_LIMIT]), _bounded(warnings)


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    if len(lines) <= 10:
        return tuple(lines)
    return (*lines[:10], f"and {len(lines) - 10} more suspicious tensors")
