"""A trainer in a process of its own that begins a pushed update, sends half of it, says so, and waits to be killed.

python -m tests.integration.stream_sender URL CHECKPOINT VERSION TRANSPORT
"""

from __future__ import annotations

import sys
import threading

import torch
from safetensors.torch import load_file

from trainer_side import Client, UpdateSession
from trainer_side.sources import as_source
from transports.registry import make_sender


def main(url: str, checkpoint: str, version: str, transport: str) -> None:
    torch.set_num_threads(1)
    source = as_source(load_file(f"{checkpoint}/model.safetensors"))
    names = list(source.specs)
    with Client(url, "") as client:
        session = UpdateSession(
            client, make_sender(transport), source.specs, version, id=f"killed-{transport}", bucket_bytes=4096
        )
        with session as update:
            for name, tensor in source.tensors():
                if tensor is None:
                    raise SystemExit("not the sender")
                update.put(name, tensor)
                if name == names[len(names) // 2]:
                    break
            print("half", flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
