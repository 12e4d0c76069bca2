"""A source as a list of parts: one walk, one digest sum and one watch over versions for every kind of trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

from trainer_side.client.causes import cause_of
from trainer_side.ranks.agreement import RankAgreement
from trainer_side.sources.steps import StepWatch
from transports.digest import MASK, to_hex
from updater.core.errors import Failure, LiveweightsError, Rejected
from updater.protocol.manifest import TensorSpec
from updater.protocol.model_document import ModelDocument

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Part(Protocol):
    """One tensor of the checkpoint, as this rank holds it."""

    @property
    def spec(self) -> TensorSpec:
        """As it travels: the clean name, the wire dtype, the whole shape. Equal on every rank."""

    @property
    def watched(self) -> Sequence[torch.Tensor]:
        """What lies on this rank and is published: its in-place writes are looked for."""

    def share(self, sender: bool) -> int | None:
        """This rank's summand of the digest, without collectives; None, on every rank, where only the whole has one.

        Summands of all ranks add up, modulo 2^64, to the digest of the whole tensor in its wire dtype.
        """

    def whole(self, sender: bool) -> torch.Tensor | None:
        """Collective where it is sharded. The whole tensor, of the wire dtype, at least on the sender."""


class PartsSource:
    """A `trainer_side.sources.WeightSource` over parts, in their order.

    `model`: as in `trainer_side.sources.source.KnowsModel`; set by what made the source of more than tensors.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        ties: Sequence[tuple[str, str]] = (),
        *,
        group: ProcessGroup | None = None,
        sender_rank: int = 0,
    ) -> None:
        """`sender_rank`: within `group`. Without a group this process pushes alone."""
        self.model: ModelDocument | None = None
        self._parts = tuple(parts)
        self._ties = tuple(sorted(ties))
        self._group = group
        self._sender = group is None or group.rank() == sender_rank
        self._specs = MappingProxyType({part.spec.name: part.spec for part in self._parts})
        self._versions = [[version_of(tensor) for tensor in part.watched] for part in self._parts]
        self._steps = StepWatch([part.watched for part in self._parts])

    @property
    def is_sender(self) -> bool:
        return self._sender

    @property
    def group(self) -> ProcessGroup | None:
        return self._group

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        return self._ties

    @torch.no_grad()
    def digests(self) -> Mapping[str, str]:
        """Local summands of all tensors, added up by one all-reduce over the group.

        Raises Rejected `manifest_mismatch` on every rank if the ranks do not hold the same names, dtypes and shapes.
        """
        if self._group is not None:
            self._agree(self._group)
        shares, failed = self._shares()
        failed = RankAgreement(self._group).agree(failed)  # or the others would wait for this rank in the all-reduce
        if failed is not None:
            raise failed
        known = {name: share for name, share in shares.items() if share is not None}
        if self._group is not None and known:
            known = dict(zip(known, self._added(self._group, list(known.values())), strict=True))
        return {name: to_hex(digest) for name, digest in known.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for part in self._parts:
            # Not held here while the next one is gathered; and on the others never handed on.
            yield part.spec.name, self._whole(part)

    def check_untouched(self) -> None:
        """Sees in-place operations by `Tensor._version`, and steps of torch's optimisers by their hooks.

        Writes through `.data`, and by kernels outside torch, leave no trace in either; digests do see them.
        """
        stepped = self._steps.stepped
        moved = [
            part.spec.name
            for at, (part, versions) in enumerate(zip(self._parts, self._versions, strict=True))
            if at in stepped or [version_of(tensor) for tensor in part.watched] != versions
        ]
        if moved:
            raise Rejected(
                *(Failure("source_changed", "written to while it was being published", tensor=name) for name in moved)
            )

    @torch.no_grad()
    def _whole(self, part: Part) -> torch.Tensor | None:
        tensor = part.whole(self._sender)
        return tensor if self._sender else None

    def _shares(self) -> tuple[dict[str, int | None], LiveweightsError | None]:
        shares: dict[str, int | None] = {}
        for part in self._parts:
            try:
                shares[part.spec.name] = part.share(self._sender)
            except Exception as error:
                return {}, cause_of(error, part.spec.name, Rejected)
        return shares, None

    def _agree(self, group: ProcessGroup) -> None:
        """Ranks that disagree would wait in different collectives; here all of them learn it."""
        text = "\n".join(f"{spec.name} {spec.dtype} {spec.shape}" for spec in self._specs.values())
        mark = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        marks = torch.tensor([mark, -mark], dtype=torch.int64, device=_device(group))
        torch.distributed.all_reduce(marks, torch.distributed.ReduceOp.MAX, group=group)
        if int(marks[0]) != -int(marks[1]):
            text = "the ranks of the trainer hold different names, dtypes or shapes"
            raise Rejected(Failure("manifest_mismatch", text, rank=group.rank()))

    def _added(self, group: ProcessGroup, shares: Sequence[int]) -> list[int]:
        signed = [share - (1 << 64) if share >> 63 else share for share in shares]
        sums = torch.tensor(signed, dtype=torch.int64, device=_device(group))
        torch.distributed.all_reduce(sums, torch.distributed.ReduceOp.SUM, group=group)  # int64 wraps around
        return [value & MASK for value in sums.tolist()]


def _device(group: ProcessGroup) -> torch.device:
    """One that the group's collectives take."""
    backend = str(torch.distributed.get_backend_config(group))
    return torch.device("cpu") if "cpu:" in backend else torch.device("cuda", torch.cuda.current_device())


def version_of(tensor: torch.Tensor) -> int | None:
    """None for inference tensors: they carry no counter, and cannot be written to outside inference mode."""
    return None if tensor.is_inference() else tensor._version
