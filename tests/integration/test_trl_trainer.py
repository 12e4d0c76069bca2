"""trl's own asynchronous trainer, on a tiny model: every version that it tells its worker of is published first."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer_side.testing import FakeCoordinator
from trainer_side.trl import LiveweightsTransfer
from transports.digest import tensor_digest, to_hex
from updater.core.errors import LiveweightsError, Rejected, Unavailable
from updater.protocol.manifest import FILE_NAME, Manifest

pytest.importorskip("trl")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone]

STEPS, TOKENS = 2, 8


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as running:
        yield running


class Worker:
    """A rollout worker of trl's protocol, in this process: as many samples of each version as a step can need."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.versions.append(model_version)
        for at in range(8):
            told = [{"role": "assistant", "content": ""}]
            mask = np.repeat([0, 1], TOKENS // 2)
            logs = np.zeros(TOKENS, dtype=np.float32)
            sample = RolloutSample(told, told, np.arange(TOKENS), mask, logs, 1.0 - at % 2, model_version, at // 2, {})
            self.rollout_buffer.put(sample)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{at}": at for at in range(30)} | {"<pad>": 30, "</s>": 31}
    plain = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="t0")


def saved_model(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, eos_token_id=31, pad_token_id=30, bos_token_id=29)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def trainer(folder: Path, transfer: LiveweightsTransfer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Everything is trl's but the loss, whose attention is a kernel for GPUs, and the name of a GPU."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    class Trainer(AsyncGRPOTrainer):  # type: ignore[misc]
        seen: list[dict[str, torch.Tensor]]

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            self.seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: "none")
    settings = AsyncGRPOConfig(
        output_dir=str(folder / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        num_generations=2,
        token_budget=0,
        weight_sync_steps=1,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    made = Trainer(
        model=saved_model(folder / "model"),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["t1"] * 4}),
        processing_class=tokenizer(),
        rollout_worker=Worker(),
        weight_transfer=transfer,
    )
    made.seen = []
    transfer.bind(made)
    return made


def test_a_training_publishes_every_version_before_its_worker_hears_of_it(
    coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = LiveweightsTransfer(
        coordinator.url, "", directory=tmp_path / "out", keep=9, dtypes={"*": "BF16", "*.norm.weight": "F32"}
    )
    made = trainer(tmp_path, transfer, monkeypatch)
    made.train()
    assert [body["version"] for body in coordinator.bodies] == [1, 2, 3] == made.rollout_worker.versions
    assert [body.get("policy", {}).get("new_run", False) for body in coordinator.bodies] == [True, False, False]
    states = [*made.seen, made.model.state_dict()]
    for body, state in zip(coordinator.bodies, states, strict=True):
        folder = Path(body["path"])
        sent = load_file(folder / "model.safetensors")
        assert set(sent) == set(state) - {"lm_head.weight"}  # tied: the trainer streams it once
        for name, tensor in sent.items():
            wanted = torch.float32 if name == "model.norm.weight" else torch.bfloat16
            assert tensor.dtype == wanted
            assert torch.equal(tensor, state[name].to(wanted))
        manifest = Manifest.from_json((folder / FILE_NAME).read_bytes())
        assert {e.name: e.digest for e in manifest.tensors} == {n: to_hex(tensor_digest(t)) for n, t in sent.items()}
    assert not torch.equal(states[0]["model.norm.weight"], states[2]["model.norm.weight"])
    assert transfer.receipt is not None
    assert transfer.receipt.outcome == "committed"


def small(transfer: LiveweightsTransfer) -> tuple[torch.nn.Module, Any]:
    """What of a trainer the plug-in looks at, where no training is needed."""
    model = torch.nn.Linear(3, 2)
    standing = SimpleNamespace(
        model=model, model_version=0, accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    )
    transfer.bind(standing)
    return model, standing


def stream(model: torch.nn.Module, taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        taken.append(name)
        yield name, parameter.detach()


def test_a_refused_version_raises_and_the_stream_is_walked_to_its_end(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    """The trainer's other ranks are inside the gathers of that stream."""
    coordinator.problem = (412, {"code": "stale_version", "failures": [{"code": "stale_version", "message": ""}]})
    transfer = LiveweightsTransfer(coordinator.url, "", directory=tmp_path)
    model, _standing = small(transfer)
    taken: list[str] = []
    with pytest.raises(Rejected) as caught:
        transfer.send_weights(stream(model, taken))
    assert caught.value.code == "stale_version"
    assert taken == ["weight", "bias"]
    transfer.destroy()


def test_nobody_to_publish_to_does_not_stop_the_other_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trainer_side.client import protocol

    monkeypatch.setattr(protocol, "BACKOFF_S", ())
    transfer = LiveweightsTransfer("http://127.0.0.1:9", "", directory=tmp_path)
    model, _standing = small(transfer)
    taken: list[str] = []
    with pytest.raises(Unavailable):
        transfer.send_weights(stream(model, taken))
    assert taken == ["weight", "bias"]


def test_a_stream_that_is_not_the_model_is_refused(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    transfer = LiveweightsTransfer(coordinator.url, "", directory=tmp_path)
    small(transfer)
    with pytest.raises(LiveweightsError) as caught:
        transfer.send_weights(stream(torch.nn.Linear(4, 2), []))
    assert caught.value.code == "tensor_shape"
    assert coordinator.bodies == []
    assert list(tmp_path.iterdir()) == []


def test_training_without_a_bound_trainer_is_refused_at_its_start() -> None:
    with pytest.raises(Rejected):
        LiveweightsTransfer("http://127.0.0.1:9", "").init_weight_transfer()
