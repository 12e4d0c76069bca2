"""Test doubles and checkpoint writers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from transports.dtypes import DTYPE_NAMES


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major bytes of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def write_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file, tensors in the order given."""
    header, payload = {}, b""
    for name, tensor in tensors.items():
        data = tensor_bytes(tensor)
        offsets = [len(payload), len(payload) + len(data)]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        payload += data
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
