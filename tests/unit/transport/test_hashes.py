"""Hashes of the files beside the weights change with what matters and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transports.disk.hashes import FolderHashes, folder_hashes
from transports.testing import refused

CONFIG = {"hidden_size": 16, "text_config": {"layers": 2, "dtype": "bfloat16"}, "dtype": "bfloat16"}


def hashes(folder: Path, **config: object) -> FolderHashes:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder_hashes(str(folder), (str(folder),))


@pytest.mark.parametrize(
    "saved_anew",
    [{"transformers_version": "5.0"}, {"dtype": "float32"}, {"_name_or_path": "x"}, {"use_cache": False},
     {"text_config": {"layers": 2, "dtype": "float32"}}],
)  # fmt: skip
def test_what_every_save_writes_does_not_count(tmp_path: Path, saved_anew: dict[str, object]) -> None:
    assert hashes(tmp_path, **saved_anew) == hashes(tmp_path)


@pytest.mark.parametrize("changed", [{"hidden_size": 32}, {"text_config": {"layers": 3}}, {"more": None}])
def test_what_the_model_is_counts(tmp_path: Path, changed: dict[str, object]) -> None:
    assert hashes(tmp_path, **changed).config != hashes(tmp_path).config


def test_quantisation_has_a_hash_of_its_own(tmp_path: Path) -> None:
    plain, packed = hashes(tmp_path), hashes(tmp_path, quantization_config={"bits": 4})
    assert packed.config == plain.config
    assert plain.quantization == ""
    assert packed.quantization not in ("", hashes(tmp_path, quantization_config={"bits": 8}).quantization)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_ties_are_read_from_the_config(tmp_path: Path, config: dict[str, object]) -> None:
    assert hashes(tmp_path, **config).tied
    assert not hashes(tmp_path).tied


def test_a_folder_without_such_files(tmp_path: Path) -> None:
    assert folder_hashes(str(tmp_path), (str(tmp_path),)) == FolderHashes()


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with refused("config_mismatch", files=["config.json"]):
        folder_hashes(str(tmp_path), (str(tmp_path),))
