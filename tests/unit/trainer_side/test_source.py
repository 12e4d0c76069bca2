"""From a state dict to a folder: what is refused, what is written, and that it appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.unit.trainer_side.written import write_folder
from trainer_side.publishing.folder import INDEX_NAME
from trainer_side.sources import as_source
from transports.digest import tensor_digest, to_hex
from updater.core.errors import Rejected
from updater.protocol.manifest import FILE_NAME, Manifest


def state(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.arange(24, dtype=torch.bfloat16).reshape(6, 4),
        "model.norm.weight": torch.ones(4, dtype=torch.float32),
        **more,
    }


def codes(error: Rejected) -> list[tuple[str, str]]:
    return [(failure.code, failure.tensor) for failure in error.failures]


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_what_is_written_is_what_was_given(tmp_path: Path) -> None:
    weights = state(
        scalar=torch.tensor(3.5),
        flags=torch.tensor([True, False]),
        bytes8=torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        long=torch.tensor([-1, 1 << 40]),
    )
    manifest = write_folder(as_source(weights), tmp_path / "0-7")
    back = loaded(tmp_path / "0-7")
    assert set(back) == set(weights)
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    digests = {entry.name: entry.digest for entry in manifest.tensors}
    assert digests == {name: to_hex(tensor_digest(tensor)) for name, tensor in weights.items()}
    assert Manifest.from_json((tmp_path / "0-7" / FILE_NAME).read_bytes()) == manifest


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(3, dtype=torch.float64), "c": torch.zeros(1)}
    write_folder(as_source(weights), tmp_path / "v")
    raw = (tmp_path / "v" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for name, tensor in weights.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_shards_have_an_index_that_names_every_tensor(tmp_path: Path) -> None:
    weights = {f"layer.{i}.weight": torch.full((16,), float(i)) for i in range(5)}
    write_folder(as_source(weights), tmp_path / "v", shard_bytes=128)
    index = json.loads((tmp_path / "v" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 5 * 64
    assert sorted(set(index["weight_map"].values())) == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "v" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), weights[name])


def test_views_are_made_contiguous(tmp_path: Path) -> None:
    matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    weights = {
        "transposed": matrix.t(),
        "column": torch.arange(8.0).reshape(4, 2)[:, 1],
        "wide": torch.ones(1).expand(5),
    }
    write_folder(as_source(weights), tmp_path / "v")
    back = loaded(tmp_path / "v")
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())


def test_parameters_are_taken_without_their_gradients(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    write_folder(as_source({"w": parameter}), tmp_path / "v")
    assert torch.equal(loaded(tmp_path / "v")["w"], torch.ones(3))


def test_config_and_tokenizer_travel_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "optimizer.bin").write_bytes(b"not this")
    manifest = write_folder(as_source(state()), tmp_path / "v", config_from=model)
    names = {path.name for path in (tmp_path / "v").iterdir()}
    assert names == {"model.safetensors", FILE_NAME, "config.json", "tokenizer.json"}
    assert manifest.config_hash
    assert manifest.tokenizer_hash
    assert not write_folder(as_source(state()), tmp_path / "w").config_hash


def test_names_lose_their_wrappers(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in state().items()}
    assert set(as_source(wrapped).specs) == set(state())


def test_one_memory_under_two_names_is_a_tie() -> None:
    head = state()["model.embed_tokens.weight"]
    weights = as_source({"model.embed_tokens.weight": head, "lm_head.weight": head})
    assert weights.ties == (("lm_head.weight", "model.embed_tokens.weight"),)


def test_halves_of_one_memory_are_no_fault() -> None:
    fused = torch.zeros(4, 3)
    assert set(as_source({"q": fused[:2], "k": fused[2:]}).specs) == {"q", "k"}


def test_names_that_share_part_of_their_memory_are_refused() -> None:
    flat = torch.zeros(10)
    with pytest.raises(Rejected) as caught:
        as_source({"a": flat[0:8], "b": flat[2:4], "c": flat[6:10]})
    assert codes(caught.value) == [("tensor_duplicate", "b"), ("tensor_duplicate", "c")]


@pytest.mark.case("B104")
def test_an_ungathered_parameter_is_refused() -> None:
    with pytest.raises(Rejected) as caught:
        as_source(state(**{"model.up.weight": torch.empty(0, dtype=torch.bfloat16)}))
    assert codes(caught.value) == [("tensor_shape", "model.up.weight")]


def test_every_fault_is_named_not_only_the_first() -> None:
    with pytest.raises(Rejected) as caught:
        as_source(
            {"a": torch.empty(0), "b": torch.zeros(2, device="meta"), "c": torch.zeros(2, dtype=torch.complex128)}
        )
    assert codes(caught.value) == [("tensor_shape", "a"), ("bad_request", "b"), ("tensor_dtype", "c")]


def test_nothing_to_publish_is_refused() -> None:
    with pytest.raises(Rejected):
        as_source({})


@pytest.mark.case("B035")
def test_an_optimiser_step_in_the_middle_is_caught(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.nn.Parameter(torch.zeros(64)) for i in range(3)}
    optimiser = torch.optim.SGD(weights.values(), lr=1.0)
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    steps = iter([optimiser.step])

    def step_once(_bytes: int) -> None:
        next(steps, lambda: None)()

    with pytest.raises(Rejected) as caught:
        write_folder(as_source(weights), tmp_path / "v", progress=step_once)
    assert codes(caught.value) == [("source_changed", name) for name in weights]
    assert list(tmp_path.iterdir()) == []


def test_a_step_before_is_no_fault(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    weight.add_(1)
    write_folder(as_source({"w": weight}), tmp_path / "v")
    assert torch.equal(loaded(tmp_path / "v")["w"], torch.ones(4))


def test_inference_tensors_have_no_counter_and_are_accepted(tmp_path: Path) -> None:
    with torch.inference_mode():
        weight = torch.ones(4)
    write_folder(as_source({"w": weight}), tmp_path / "v")


def test_the_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(_bytes: int) -> None:
        seen.append([path.name for path in tmp_path.iterdir() if not path.name.startswith(".")])

    write_folder(as_source(state()), tmp_path / "0-7", progress=look)
    assert seen == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["0-7"]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(as_source(state()), tmp_path / "0-7", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    write_folder(as_source(state()), tmp_path / "0-7")
    before = (tmp_path / "0-7" / "model.safetensors").read_bytes()
    with pytest.raises(OSError):
        write_folder(as_source({"other": torch.zeros(3)}), tmp_path / "0-7")
    assert (tmp_path / "0-7" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["0-7"]
