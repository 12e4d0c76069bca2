"""The exchange in place: any interruption can be gone on from or taken back, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_adapter.rank.exchange import Exchange, is_dense, one_thread, raw_bytes


class Interrupted(Exception):
    pass


class FailAt(TorchDispatchMode):
    """The n-th copy does half of its work and raises."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            if self.left == 0:
                target, source = args[0].flatten(), args[1].flatten()
                half = target.numel() // 2
                target[:half].view(-1).copy_(source[:half])
                raise Interrupted
            self.left -= 1
        return func(*args, **(kwargs or {}))


def sides() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """bf16, fp8, a 0-d, an empty, a transposed one, and one with gaps."""

    def make(offset: int) -> list[torch.Tensor]:
        wide = torch.full((6, 8), 50 + offset, dtype=torch.int32)
        wide[:, :5] = torch.arange(30).view(6, 5) + 100 * offset
        return [
            (torch.arange(70) + offset).to(torch.bfloat16),
            (torch.arange(9) + offset).to(torch.float8_e4m3fn),
            torch.tensor(3.0 + offset),
            torch.empty(0, 4),
            (torch.arange(12.0) + offset).view(3, 4).t(),
            wide[:, :5],
        ]

    return make(0), make(1)


def snapshot(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(t.contiguous().view(torch.uint8).flatten().tolist()) if t.dim() else str(t).encode() for t in tensors]


def exchange(chunk: int = 16) -> tuple[Exchange, Callable[[], tuple[list[bytes], list[bytes]]]]:
    first, second = sides()
    return Exchange(list(zip(first, second, strict=True)), chunk), lambda: (snapshot(first), snapshot(second))


def test_forward_trades_every_byte_and_backward_brings_it_back() -> None:
    trade, look = exchange()
    old = look()
    assert old[0] != old[1]
    trade.forward()
    assert look() == (old[1], old[0])
    trade.backward()
    assert look() == old


def test_gaps_of_a_strided_tensor_belong_to_others() -> None:
    a, b = torch.zeros(4, 8), torch.ones(4, 8)
    Exchange([(a[:, :5], b[:, :5])], 64).forward()
    assert a[:, :5].eq(1).all()
    assert a[:, 5:].eq(0).all()
    assert b[:, 5:].eq(1).all()


def copies_needed() -> int:
    trade, _ = exchange()
    return 3 * trade.chunks


@pytest.mark.parametrize("then", ["forward", "backward"])
@pytest.mark.parametrize("first", ["forward", "backward"])
def test_any_interruption_ends_on_either_side(first: str, then: str) -> None:
    for n in range(copies_needed()):
        trade, look = exchange()
        old = look()
        if first == "backward":
            trade.forward()
        with pytest.raises(Interrupted), FailAt(n):
            getattr(trade, first)()
        with pytest.raises(RuntimeError):
            # the last copy of the last chunk done in full would be the only settled place, and it was not
            trade.settle()
        getattr(trade, then)()
        assert look() == ((old[1], old[0]) if then == "forward" else old), n


def test_interrupted_twice() -> None:
    for n in range(copies_needed()):
        trade, look = exchange()
        old = look()
        with pytest.raises(Interrupted), FailAt(n):
            trade.forward()
        with pytest.raises(Interrupted), FailAt(0):
            trade.backward()
        trade.backward()
        assert look() == old, n


def test_settled_is_the_new_beginning() -> None:
    trade, look = exchange()
    old = look()
    trade.forward()
    trade.settle()
    trade.backward()
    assert look() == (old[1], old[0])
    trade.forward()
    assert look() == old


def test_views_of_bytes() -> None:
    assert is_dense(torch.zeros(3, 4).t())
    assert is_dense(torch.zeros(()))
    assert not is_dense(torch.zeros(3, 8)[:, :4])
    assert not is_dense(torch.zeros(3, 1).expand(3, 4))
    base = torch.arange(10, dtype=torch.int16)
    assert raw_bytes(base[3:5]).tolist() == [3, 0, 4, 0]


def test_the_thread_count_comes_back() -> None:
    before, inside = torch.get_num_threads(), []

    def fail() -> None:
        with one_thread():
            inside.append(torch.get_num_threads())
            raise Interrupted

    with pytest.raises(Interrupted):
        fail()
    assert (inside, torch.get_num_threads()) == ([1], before)
