"""A request that arrives while the generation loop ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from engine_adapter.base import EngineSpec, GenerateRequest
from engine_adapter.transformers.engine import TransformersEngine
from engine_adapter.transformers.loading import Options
from updater.core.errors import LiveweightsError


class EndingManager:
    """Like the library's manager whose loop is about to end: it takes nothing, and says nothing."""

    def __init__(self, drives: bool, takes: bool) -> None:
        self.is_tp_driver, self.takes = drives, takes
        self.added: list[str] = []

    def add_request(self, _prompt: list[int], *, request_id: str, **_options: Any) -> str | None:
        self.added.append(request_id)
        return request_id if self.takes else None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
        self.config = LlamaConfig(vocab_size=100, num_hidden_layers=1, **sizes)


def engine(manager: EndingManager) -> TransformersEngine:
    spec = EngineSpec(rank=0, size=1, model="", rendezvous="", options={})
    made = TransformersEngine(spec, Options.of(spec), Model())
    made._manager = manager  # type: ignore[assignment]
    return made


def request(name: str = "r1") -> GenerateRequest:
    return GenerateRequest(name, (1, 2, 3), 4)


def test_what_the_ending_loop_drops_is_refused_and_its_id_is_free() -> None:
    manager = EndingManager(drives=True, takes=False)
    subject = engine(manager)
    for _ in range(2):
        with pytest.raises(LiveweightsError) as caught:
            subject.submit(request())
        assert caught.value.code == "rank_failed"
    assert manager.added == ["r1", "r1"]


def test_what_it_takes_is_running() -> None:
    subject = engine(EndingManager(drives=True, takes=True))
    subject.submit(request())
    with pytest.raises(LiveweightsError) as caught:
        subject.submit(request())
    assert caught.value.code == "id_reused"
