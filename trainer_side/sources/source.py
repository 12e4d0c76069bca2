"""The seam of a trainer's weights: what every kind of trainer can say of them, and how they are walked.

Every rank of the trainer holds a source and does the same with it in the same order: `digests` and `tensors` may use
collectives of the trainer's own groups. One rank, the sender, gets whole tensors; the others only take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from updater.protocol.manifest import TensorSpec
from updater.protocol.model_document import ModelDocument

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class WeightSource(Protocol):
    """Re-iterable. Nothing is copied or gathered before it is asked for, and at most one tensor at a time is whole."""

    @property
    def is_sender(self) -> bool:
        """Whether this rank gets the tensors. True on exactly one rank; always without a process group."""

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that push together, all of which call `push`; None: this process pushes alone."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """In the order of `tensors`, under the names and with the dtypes of the checkpoint. Equal on every rank."""

    @property
    def ties(self) -> tuple[tuple[str, str], ...]:
        """(alias, canonical name), sorted: names of one storage."""

    def digests(self) -> Mapping[str, str]:
        """Collective. Digests (16 hex digits) that can be had without gathering a tensor: local shards, added up.

        May lack names, of tensors that are computed on the way; equal on every rank.
        """

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Collective: whole tensors on the sender, None elsewhere. A tensor is valid until the next one is asked for.

        Once begun it is walked to its end on every rank, whatever happens to the update, unless it raises on one of
        them: then no rank asks for more. Raise between collectives where you can: a rank that waits in one for another
        that has raised comes back only when the time-out of that collective's group lets it.
        """

    def check_untouched(self) -> None:
        """Raise Rejected `source_changed` if an optimiser wrote to what is published since the source was made."""


@runtime_checkable
class KnowsModel(Protocol):
    """A `WeightSource` that may say this of its tensors beside their specs."""

    @property
    def model(self) -> ModelDocument | None:
        """Config, tokenizer and quantisation that the tensors are of, for the engines to compare; None: not known.

        Asked of the rank that sends.
        """


def model_of(source: WeightSource) -> ModelDocument | None:
    """What a source says of its model; None for one that says nothing."""
    return source.model if isinstance(source, KnowsModel) else None
