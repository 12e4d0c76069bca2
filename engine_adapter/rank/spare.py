"""The spare: a second storage for every parameter of a rank, allocated and touched once.

It is what an update is staged into and, after the install, what the previous version lies in. `RankSpare` moves bytes
and bindings and keeps the state; who may do what when is the rank agent's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from engine_adapter.base import Parameter
from engine_adapter.rank.exchange import CHUNK_BYTES, Exchange, is_dense
from updater.core.errors import refuse
from updater.core.participant import SpareState
from updater.core.policy import InstallMode

_ALIGN = 256
_ARENA_BYTES = 1 << 30


class RankSpare:
    """Two sides of equal tensors per parameter; one is live. `live` and `spare` map parameter names to tensors.

    `on_host`: the second side lies in host memory, pinned where the first is on a device; only `exchange` installs it.
    Raises `Rejected` (`no_space`, `placement_refused`) at construction where a second copy is not possible.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], chunk_bytes: int = CHUNK_BYTES, on_host: bool = False
    ) -> None:
        self._parameters = dict(sorted(parameters.items()))
        first = {name: parameter.local.detach() for name, parameter in self._parameters.items()}
        _check_ownership(first)
        self._sides: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = (first, _allocate(first, on_host))
        self._on_host = on_host
        self._side = 0  # which side is bound, if the last flip is whole
        self._flip_open = False  # a flip may have stopped in the middle
        self._mode: InstallMode | None = None  # of the install that is not settled
        self._from_side = 0
        pairs = [(first[name], self._sides[1][name]) for name in first]
        self._exchange = Exchange(pairs, chunk_bytes)
        self.state = SpareState.EMPTY
        self.serial = 0
        self.version = ""
        self.digest = ""

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        return self._sides[self._side]

    @property
    def spare(self) -> Mapping[str, torch.Tensor]:
        return self._sides[1 - self._side]

    @property
    def nbytes(self) -> int:
        """Memory beside the live tensors: the second side and the bounce buffer."""
        return sum(_span_bytes(tensor) for tensor in self._sides[1].values()) + self._exchange.bounce_bytes

    def set_state(self, state: SpareState, *, serial: int = 0, version: str = "", digest: str = "") -> None:
        self.state, self.serial, self.version, self.digest = state, serial, version, digest

    def poison(self) -> None:
        """Every byte of the spare becomes 0xFF (NaN in every float dtype): what is not written will be seen."""
        for tensor in self.spare.values():
            carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
            tensor.view(carrier).fill_(255 if carrier == torch.uint8 else -1)

    # installing

    def install(self, mode: InstallMode) -> None:
        """Spare becomes live, live becomes spare. After an exception: `undo`. Nothing else may be between."""
        if self._mode is not None:
            raise RuntimeError("the last install is neither settled nor undone")
        self._mode, self._from_side = mode, self._side
        if mode is InstallMode.FLIP and not self._on_host:
            self._bind(1 - self._side)
        elif mode is InstallMode.EXCHANGE:
            self._exchange.forward()
        else:
            self._mode = None
            raise ValueError(f"not an install mode of a spare: {mode}")

    def undo(self) -> None:
        """Take `install` back, whole or half done; may be repeated until it returns. Without one: nothing."""
        if self._mode is InstallMode.FLIP:
            self._bind(self._from_side)
        elif self._mode is InstallMode.EXCHANGE:
            self._exchange.backward()
        self._mode = None

    def settle(self) -> None:
        """The install stands: from here on the spare is the way back by another install, not by `undo`."""
        self._exchange.settle()
        self._mode = None

    @property
    def whole(self) -> bool:
        """Whether no install or undo is stuck in the middle."""
        return not self._flip_open and self._exchange.moved in (0, self._exchange.chunks)

    def _bind(self, side: int) -> None:
        """Rebinds every parameter, also those that already are: a repetition ends in the same place."""
        self._flip_open = True
        tensors = self._sides[side]
        for name, parameter in self._parameters.items():
            parameter.rebind(tensors[name])
        self._side, self._flip_open = side, False

    # what must not change between the vote and the pause

    def fingerprint(self) -> tuple[tuple[str, int, int, tuple[int, ...], str], ...]:
        """Addresses, shapes and dtypes of both sides."""
        return tuple(
            (name, live.data_ptr(), self.spare[name].data_ptr(), tuple(live.shape), str(live.dtype))
            for name, live in self.live.items()
        )

    @property
    def asleep(self) -> bool:
        """Whether the memory behind a parameter was freed."""
        return any(t.numel() and not t.untyped_storage().nbytes() for side in self._sides for t in side.values())


def _check_ownership(tensors: Mapping[str, torch.Tensor]) -> None:
    """Two parameters over the same bytes would be written twice; a parameter over itself cannot be read back."""
    spans: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors.items():
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise refuse("placement_refused", "an expanded tensor cannot be a parameter", tensor=name)
        if tensor.numel() and is_dense(tensor):
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + _span_bytes(tensor), name))
    for (device, _, end, name), (device_b, start_b, _, other) in pairwise(sorted(spans)):
        if device == device_b and start_b < end:
            raise refuse("placement_refused", f"shares its memory with {other}: a tie must be an alias", tensor=name)


def _span_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _allocate(tensors: Mapping[str, torch.Tensor], on_host: bool) -> dict[str, torch.Tensor]:
    """Tensors like the given ones in few large buffers, every page touched; on their devices or on the host."""
    result: dict[str, torch.Tensor] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        batch: list[str] = []
        used = 0
        for name in [n for n, tensor in tensors.items() if tensor.device == device]:
            need = -(-_span_bytes(tensors[name]) // _ALIGN) * _ALIGN
            if batch and used + need > _ARENA_BYTES:
                result |= _arena(device, on_host, used, batch, tensors)
                batch, used = [], 0
            batch.append(name)
            used += need
        result |= _arena(device, on_host, used, batch, tensors)
    return {name: result[name] for name in tensors}


def _arena(
    device: torch.device, on_host: bool, size: int, names: list[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    pinned = on_host and device.type == "cuda"
    device = torch.device("cpu") if on_host else device
    try:
        # fill_ and not zeros: pages of a fresh zeroed allocation are not there until they are written
        arena = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned).fill_(0)
    except (RuntimeError, MemoryError) as error:
        raise refuse("no_space", f"no {size} bytes for the spare on {device}: {error}") from None
    result: dict[str, torch.Tensor] = {}
    offset = 0
    for name in names:
        like, span = tensors[name], _span_bytes(tensors[name])
        piece = arena[offset : offset + span].view(like.dtype)
        result[name] = piece.as_strided(like.shape, like.stride(), piece.storage_offset())
        offset += -(-span // _ALIGN) * _ALIGN
    return result
