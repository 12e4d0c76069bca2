"""`dtypes="engine"`: every tensor travels in the dtype that the fleet holds it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_side import flows
from trainer_side.lockstep import Lockstep
from trainer_side.running import Link
from trainer_side.sources.casts import ROUNDED, Casts
from trainer_side.weights import WeightSource
from updater.core.dtypes import wanted
from updater.core.errors import Failure, Rejected
from updater.manifest import TensorSpec


def fitted(link: Link, source: WeightSource) -> tuple[Casts, str]:
    """What the tensors of `source` are to be rounded to, and the fingerprint of what was read.

    The sending rank reads it and tells the others: the same on every rank, or the same error. Raises Rejected
    `tensor_dtype` for a tensor that the fleet does not hold as it comes: quantised, or something is computed from it.
    """
    ask = lambda: dict(link.run(flows.get("/v1/fleet/dtypes")))  # noqa: E731
    told = Lockstep(source.group).lead(ask if source.is_sender else None)
    return casts_for(source.specs, told["dtypes"], source.ties), str(told["fingerprint"])


def casts_for(specs: Mapping[str, TensorSpec], held: Mapping[str, Any], ties: Sequence[tuple[str, str]] = ()) -> Casts:
    """`held`: rules of `updater.core.dtypes`. A name that they do not know stays as it is, or as what it is tied to."""
    found = {name: wanted(held, name) for name, spec in specs.items() if spec.dtype in ROUNDED}
    for pair in ties:
        for one, other in (pair, pair[::-1]):
            if found.get(one) is None and found.get(other) is not None:
                found[one] = found[other]
    faults = [
        Failure(
            "tensor_dtype",
            "the fleet holds it quantised, or computes something from it",
            tensor=name,
            hint='pass the dtypes yourself: dtypes={"*": "BF16"}',
        )
        for name, dtype in found.items()
        if dtype == ""
    ]
    if faults:
        raise Rejected(*faults)
    return Casts(exact={name: dtype for name, dtype in found.items() if dtype})
