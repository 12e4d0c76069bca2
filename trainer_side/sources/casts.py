"""The dtype that a tensor travels in: its own, or what the caller's patterns say. The sender casts, not the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from transports.dtypes import DTYPE_NAMES, TORCH_DTYPES
from updater.core.errors import Failure, Rejected, refuse

#: Types between which a cast is only a rounding. Eight-bit types need scales, integers are no weights to round.
ROUNDED = ("F64", "F32", "BF16", "F16")

#: The word for what the fleet holds.
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Casts:
    """(glob pattern over clean names, safetensors dtype) in order: the last pattern that matches decides.

    `exact`: {clean name: safetensors dtype}, before the patterns.
    """

    rules: tuple[tuple[str, str], ...] = ()
    exact: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, dtypes: Dtypes | None) -> Casts:
        """Raises Rejected `tensor_dtype` for a target that no weight is merely rounded to."""
        if isinstance(dtypes, Casts):
            return dtypes
        if dtypes == ENGINE:
            raise refuse("bad_request", 'dtypes="engine" is for push and Pusher, which ask the fleet')
        if isinstance(dtypes, str | torch.dtype):
            dtypes = {"*": dtypes}
        rules = tuple((pattern, _name(target)) for pattern, target in (dtypes or {}).items())
        faults = [
            Failure(
                "tensor_dtype",
                f"{pattern!r} asks for {target}: only {', '.join(ROUNDED)} are casts",
                hint='pass dtypes="bfloat16", or {"*": "BF16"} with patterns of names',
            )
            for pattern, target in rules
            if target not in ROUNDED
        ]
        if faults:
            raise Rejected(*faults)
        return cls(rules)

    def wire(self, name: str, dtype: str) -> str:
        """safetensors dtype that tensor `name`, held as `dtype`, travels in."""
        if dtype not in ROUNDED:
            return dtype
        if name in self.exact:
            return self.exact[name]
        for pattern, target in reversed(self.rules):
            if fnmatchcase(name, pattern):
                return target
        return dtype

    def check(self, names: Iterable[str]) -> None:
        """Raises Rejected `bad_request` for a pattern that meets no tensor: a misspelt router would be rounded."""
        known = tuple(names)
        faults = [
            Failure("bad_request", f"dtypes: no tensor is named like {pattern!r}")
            for pattern, _target in self.rules
            if not any(fnmatchcase(name, pattern) for name in known)
        ]
        if faults:
            raise Rejected(*faults)


#: {glob pattern: dtype}, or one dtype for all. A dtype is torch's, its name, or the name in safetensors.
#: `"engine"`, to `push` alone: what the fleet holds.
Dtypes = Mapping[str, str | torch.dtype] | str | torch.dtype | Casts


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """`tensor` itself where it is of that safetensors dtype already, else a rounded copy; a view that is negated or
    conjugated only in name becomes a copy that is so in memory.

    The same bits for the same element wherever it lies in a tensor: vector and scalar code of one machine make
    different NaNs, so a NaN becomes the plain one, and digests of shards add up to that of the whole.
    """
    target = TORCH_DTYPES[dtype]
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == target:
        return tensor
    rounded = tensor.to(target)
    if not bool(torch.isfinite(rounded.sum(dtype=torch.float32))):
        rounded.masked_fill_(rounded.isnan(), float("nan"))
    return rounded


def _name(target: str | torch.dtype) -> str:
    found = target if isinstance(target, torch.dtype) else getattr(torch, str(target).removeprefix("torch."), None)
    return DTYPE_NAMES.get(found, str(target)) if isinstance(found, torch.dtype) else str(target)
