"""What goes wrong with checkpoints: copies of a whole one, each spoiled in one way, beside the whole one's manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def spoiled(whole: Path, broken: Path, spoil: Callable[[Path], None]) -> None:
    from transports.manifests import write_manifest

    shutil.copytree(whole, broken)
    write_manifest(str(broken))  # of the weights as they should be
    spoil(broken)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size - 1000)


def drop_tensor(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    # A manifest would give it away before the engine's own expectations do.
    (folder / "liveweights.manifest.json").unlink()


def swap_keys_and_values(folder: Path) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
        tensors[k], tensors[v] = tensors[v], tensors[k]

    _rewrite(folder, swap)


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
