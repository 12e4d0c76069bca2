"""What the embedded engine says when it cannot start."""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_adapter.base import EngineSpec
from engine_adapter.models import ModelShape, make_model
from engine_adapter.transformers.engine import build
from engine_adapter.transformers.loading import Options, load_model
from updater.core.errors import Failure, LiveweightsError

#: A file of the kernel's, which has a size, can be read, and cannot be mapped.
UNMAPPABLE = Path("/sys/devices/system/cpu/online")


def mapping(path: Path) -> int | None:
    """Number of the error that keeps the kernel from mapping a file, or None."""
    try:
        with path.open("rb") as file:
            mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ).close()
    except OSError as error:
        return error.errno
    return None


def refused(spec: EngineSpec) -> Failure:
    with pytest.raises(LiveweightsError) as caught:
        load_model(spec, Options.of(spec))
    (failure,) = caught.value.failures
    return failure


@pytest.mark.case("F25")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "cure"),
    [(4, 1, 2, "--tp 1"), (6, 3, 2, "--tp 1 or 3"), (4, 2, 4, "--tp 1 or 2")],
)
def test_heads_that_ranks_cannot_share_out_are_refused_with_their_numbers(
    tmp_path: Path, heads: int, kv_heads: int, size: int, cure: str
) -> None:
    shape = ModelShape(heads=heads, kv_heads=kv_heads, hidden=192)
    model = make_model(tmp_path / "model", shape)
    failure = refused(EngineSpec(0, size, str(model), str(tmp_path / "rendezvous"), {}))
    assert (failure.code, failure.file) == ("placement_refused", str(model))
    numbers = {heads, kv_heads, size}
    assert numbers <= {int(word) for word in failure.message.split() if word.isdigit()}
    assert cure in failure.hint


@pytest.mark.case("F25")
def test_a_start_that_fails_inside_the_generation_loop_says_why(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    engine = build(EngineSpec(0, 1, str(model), "", {"threads": 1, "num_blocks": 10**9}))
    with pytest.raises(LiveweightsError) as caught:
        engine.start(lambda _event: None)
    assert caught.value.code == "rank_failed"
    assert "MemoryError" in str(caught.value)
    assert "MemoryError" in str(engine.failure)


@pytest.mark.case("F32")
def test_a_start_from_storage_that_cannot_be_mapped_names_the_file(tmp_path: Path) -> None:
    assert mapping(UNMAPPABLE) == errno.ENODEV
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(UNMAPPABLE)
    failure = refused(EngineSpec(0, 1, str(model), "", {}))
    assert (failure.code, failure.file) == ("placement_refused", str(model / "model.safetensors"))
    assert failure.hint


@pytest.mark.case("F25")
@pytest.mark.parametrize("cut", [lambda data: b"", lambda data: data[:-100], lambda data: b"x" * 1000])
def test_a_broken_file_of_weights_is_named(tmp_path: Path, cut: Callable[[bytes], bytes]) -> None:
    model = make_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(cut(weights.read_bytes()))
    failure = refused(EngineSpec(0, 1, str(model), "", {}))
    assert (failure.code, failure.file) == ("placement_refused", str(weights))


@pytest.mark.case("F25")
def test_a_folder_in_the_place_of_weights_is_named_and_not_called_storage(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    failure = refused(EngineSpec(0, 1, str(model), "", {}))
    assert (failure.code, failure.file) == ("placement_refused", str(model / "model.safetensors"))
    assert not failure.hint


@pytest.mark.case("F25")
@pytest.mark.parametrize(
    ("config", "said"),
    [({"num_attention_heads": "x"}, "num_attention_heads"), ({"hidden_act": "none of these"}, "none of these"),
     ({"model_type": "none of these"}, "none of these"), ({"num_attention_heads": 0}, "ZeroDivisionError"),
     ({"intermediate_size": 7}, "RuntimeError")],
)  # fmt: skip
def test_whatever_the_library_raises_is_typed_with_its_words(
    tmp_path: Path, config: dict[str, object], said: str
) -> None:
    model = make_model(tmp_path / "model")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    failure = refused(EngineSpec(0, 1, str(model), "", {}))
    assert (failure.code, failure.file) == ("placement_refused", str(model))
    assert said in failure.message
