"""The spare: layout, flips that fail in the middle, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine_adapter.base import Parameter
from engine_adapter.rank.spare import RankSpare
from transports.testing import refused
from updater.core.participant import SpareState
from updater.core.policy import InstallMode


class Model:
    """Parameters that record what a forward pass would read. `fail_at`: a rebind that raises, counted down."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.bound = dict(tensors)
        self.fail_at = -1
        self.parameters = {name: Parameter(name, t, self._rebinder(name)) for name, t in tensors.items()}

    def _rebinder(self, name: str) -> Callable[[torch.Tensor], None]:
        def rebind(tensor: torch.Tensor) -> None:
            self.fail_at -= 1
            if self.fail_at == -1:
                raise OSError("no")
            self.bound[name] = tensor

        return rebind

    def values(self) -> list[float]:
        return [t.flatten()[0].item() for t in self.bound.values()]


def model() -> tuple[Model, RankSpare]:
    made = Model(a=torch.zeros(3, 4), b=torch.zeros(5, dtype=torch.bfloat16), c=torch.zeros(4, 3).t())
    spare = RankSpare(made.parameters, chunk_bytes=16)
    for tensor in spare.spare.values():
        tensor.fill_(1)
    return made, spare


def test_spare_tensors_look_like_the_live_ones() -> None:
    wide = torch.zeros(4, 8)
    made = Model(a=torch.zeros(3, 4), t=torch.zeros(4, 3).t(), s=torch.zeros(()), e=torch.zeros(0, 2), g=wide[:, :5])
    spare = RankSpare(made.parameters)
    for name, live in spare.live.items():
        other = spare.spare[name]
        assert (other.shape, other.stride(), other.dtype) == (live.shape, live.stride(), live.dtype)
        assert live.data_ptr() == made.bound[name].data_ptr()
        other.fill_(7)
    assert all(t.eq(0).all() for t in spare.live.values())
    assert all(t.eq(7).all() for t in spare.spare.values())


@pytest.mark.parametrize("mode", [InstallMode.FLIP, InstallMode.EXCHANGE])
def test_install_undo_and_install_again(mode: InstallMode) -> None:
    made, spare = model()
    addresses = {name: t.data_ptr() for name, t in made.bound.items()}
    spare.install(mode)
    assert made.values() == [1, 1, 1]
    assert [t.flatten()[0].item() for t in spare.spare.values()] == [0, 0, 0]
    spare.undo()
    assert made.values() == [0, 0, 0]
    spare.install(mode)
    spare.settle()
    spare.undo()  # nothing to undo any more
    assert made.values() == [1, 1, 1]
    spare.install(mode)
    assert made.values() == [0, 0, 0]
    moved = addresses != {name: t.data_ptr() for name, t in made.bound.items()}
    assert not moved  # two flips are none; an exchange keeps every address


@pytest.mark.case("B081")
def test_exchange_keeps_addresses_and_flip_does_not() -> None:
    for mode in (InstallMode.FLIP, InstallMode.EXCHANGE):
        made, spare = model()
        before = made.bound["a"].data_ptr()
        spare.install(mode)
        assert (made.bound["a"].data_ptr() == before) == (mode is InstallMode.EXCHANGE)


def test_a_flip_that_fails_anywhere_can_be_undone() -> None:
    for n in range(3):
        made, spare = model()
        made.fail_at = n
        with pytest.raises(OSError, match="no"):
            spare.install(InstallMode.FLIP)
        assert not spare.whole
        assert sorted(made.values()) != [1, 1, 1]
        made.fail_at = 0
        with pytest.raises(OSError, match="no"):
            spare.undo()
        spare.undo()
        assert spare.whole
        assert made.values() == [0, 0, 0]
        spare.install(InstallMode.FLIP)
        assert made.values() == [1, 1, 1]


def test_modes_mix_from_update_to_update() -> None:
    made, spare = model()
    for i, mode in enumerate([InstallMode.FLIP, InstallMode.EXCHANGE, InstallMode.EXCHANGE, InstallMode.FLIP]):
        spare.install(mode)
        spare.settle()
        assert made.values() == [(i + 1) % 2] * 3


def test_an_unsettled_install_blocks_the_next() -> None:
    _, spare = model()
    spare.install(InstallMode.FLIP)
    with pytest.raises(RuntimeError):
        spare.install(InstallMode.FLIP)


def test_updates_add_no_memory() -> None:
    made, spare = model()
    size = spare.nbytes
    shard = sum(t.nbytes for t in made.bound.values())
    assert size <= shard + 2 * 16
    storages = {t.untyped_storage().data_ptr() for side in (spare.live, spare.spare) for t in side.values()}
    for mode in [InstallMode.FLIP, InstallMode.EXCHANGE] * 5:
        spare.install(mode)
        spare.settle()
    assert spare.nbytes == size
    assert storages == {t.untyped_storage().data_ptr() for s in (spare.live, spare.spare) for t in s.values()}


def test_poison_is_seen_in_every_float_dtype() -> None:
    names = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"]
    made = Model(
        **{name: torch.zeros(3, dtype=getattr(torch, name)) for name in names}, i=torch.zeros(2, dtype=torch.int8)
    )
    spare = RankSpare(made.parameters)
    spare.poison()
    assert all(spare.spare[name].float().isnan().all() for name in names)
    assert spare.spare["i"].tolist() == [-1, -1]
    assert all(t.float().eq(0).all() for t in spare.live.values())


def test_a_spare_on_the_host_is_exchanged_and_never_bound() -> None:
    made = Model(a=torch.arange(5.0), b=torch.ones(3, 3))
    spare = RankSpare(made.parameters, chunk_bytes=16, on_host=True)
    live = dict(made.bound)
    for tensor in spare.spare.values():
        tensor.fill_(7)
    with pytest.raises(ValueError):
        spare.install(InstallMode.FLIP)
    spare.install(InstallMode.EXCHANGE)
    assert all(made.bound[name] is tensor for name, tensor in live.items())
    assert made.bound["a"].tolist() == [7] * 5
    assert spare.spare["a"].tolist() == [0, 1, 2, 3, 4]
    spare.settle()


def test_shared_or_expanded_memory_is_refused() -> None:
    base = torch.zeros(8)
    with refused("placement_refused"):
        RankSpare(Model(a=base, b=base[:4]).parameters)
    with refused("placement_refused"):
        RankSpare(Model(a=torch.zeros(1).expand(4)).parameters)
    RankSpare(Model(a=base[:4], b=base[4:]).parameters)


def test_fingerprint_and_sleep() -> None:
    made, spare = model()
    before = spare.fingerprint()
    assert spare.fingerprint() == before
    assert not spare.asleep
    made.bound["a"].untyped_storage().resize_(0)
    assert spare.asleep
    assert spare.fingerprint() != before


def test_begins_empty() -> None:
    _, spare = model()
    assert spare.state is SpareState.EMPTY
