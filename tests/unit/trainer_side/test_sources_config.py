"""What a module says of its config: the model's own, whatever wraps it, without what a trainer changed for itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from tests.unit.trainer_side.written import write_folder
from trainer_side.publishing.background import Snapshot
from trainer_side.ranks.agreement import RankAgreement
from trainer_side.sources import as_source
from trainer_side.sources.source import model_of
from transports.disk.hashes import folder_document
from transports.disk.source import DiskSource
from updater.core.participant import Compared
from updater.protocol.model_document import ModelDocument, compare

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def said(module: nn.Module) -> ModelDocument:
    found = model_of(as_source(module))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> ModelDocument:
    """What the engine started on."""
    folder = tmp_path_factory.mktemp("saved")
    model().save_pretrained(folder)
    return folder_document(str(folder), ("/",))


def keys(theirs: ModelDocument, ours: ModelDocument) -> list[str]:
    return [failure.message.split(" ")[0] for failure in compare(theirs, ours).refused]


@pytest.mark.case("F01")
def test_a_model_says_the_config_that_a_save_of_it_would(saved: ModelDocument) -> None:
    found = compare(said(model()), saved)
    assert (found.refused, found.compared) == ((), Compared("engine", "none", "engine"))
    assert not [text for text in found.warnings if "architectures" in text]
    assert keys(said(model(rms_norm_eps=0.5)), saved) == ["rms_norm_eps"]


@pytest.mark.case("F01")
def test_what_a_trainer_changes_for_itself_is_no_difference(saved: ModelDocument) -> None:
    trained = model(attention_dropout=0.1, use_cache=False, initializer_range=0.5, pretraining_tp=2).double()
    trained.config._attn_implementation = "eager"
    trained.config.router_aux_loss_coef = 0.1
    trained.config.hidden_dropout_prob = 0.1
    trained.gradient_checkpointing_enable()
    assert compare(said(trained), saved).refused == ()


@pytest.mark.case("F01")
def test_a_padded_vocabulary_is_for_the_shapes_to_refuse(saved: ModelDocument) -> None:
    trained = model()
    trained.resize_token_embeddings(32, pad_to_multiple_of=64)
    found = compare(said(trained), saved)
    assert found.refused == ()
    assert [text for text in found.warnings if "vocab_size" in text]


@pytest.mark.case("F01")
@pytest.mark.parametrize("wrap", ["compiled", "checkpointed", "data_parallel", "peft", "peft_compiled"])
def test_wrappers_are_looked_through(wrap: str, saved: ModelDocument) -> None:
    inner = model()
    made: nn.Module = inner
    if wrap.startswith("peft"):
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    if wrap == "data_parallel":
        made = nn.DataParallel(inner)
    if wrap == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        made = checkpoint_wrapper(inner)
    if wrap.endswith("compiled"):
        made = torch.compile(made)  # type: ignore[assignment]
    found = compare(said(made), saved)
    assert (found.refused, found.compared.config) == ((), "engine")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.case("F01")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2", "fsdp2_peft"])
@pytest.mark.usefixtures("alone")
def test_sharded_models_are_looked_through(wrap: str, saved: ModelDocument) -> None:
    made: nn.Module = model()
    if wrap == "ddp":
        made = nn.parallel.DistributedDataParallel(made)
    elif wrap == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        made = FullyShardedDataParallel(made, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if wrap == "fsdp2_peft":
            from peft import LoraConfig, get_peft_model

            made = get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[arg-type]
        fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    found = compare(said(made), saved)
    assert (found.refused, found.compared.config) == ((), "engine")
    assert not [text for text in found.warnings if "architectures" in text]


@pytest.mark.case("F01")
def test_other_modules_and_tensors_say_nothing(tmp_path: Path) -> None:
    assert model_of(as_source(nn.Linear(2, 2))) is None
    assert model_of(as_source(model().state_dict())) is None
    assert model_of(as_source(nn.ModuleDict({"mine": model()}))) is None  # its names are no engine's either

    class Odd(PretrainedConfig):
        def to_json_string(self, use_diff: bool = True) -> str:
            raise TypeError("holds what JSON has not")

    odd = model()
    odd.config = Odd()
    assert model_of(as_source(odd)) is None
    assert model_of(as_source(model(rms_norm_eps=0.5, unknown="x" * (65 << 10)))) is None


@pytest.mark.case("F01")
def test_a_copy_and_a_folder_say_the_same(tmp_path: Path, saved: ModelDocument) -> None:
    source = as_source(model(rms_norm_eps=0.5))
    assert model_of(Snapshot(source, torch.clone, RankAgreement(None))) == model_of(source)
    write_folder(source, tmp_path / "bare")
    with DiskSource.open(str(tmp_path / "bare"), ("/",)) as disk:
        assert keys(disk.document(), saved) == ["rms_norm_eps"]
    model().save_pretrained(tmp_path / "named")
    write_folder(source, tmp_path / "beside", config_from=tmp_path / "named")
    with DiskSource.open(str(tmp_path / "beside"), ("/",)) as disk:
        assert keys(disk.document(), saved) == []
