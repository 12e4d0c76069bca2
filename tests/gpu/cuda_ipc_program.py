"""A rank as a process: `python cuda_ipc_program.py cuda|stand-in`, told what to do line by line, in JSON.

{"do": "read", "offer", "specs": [[name, dtype, shape], ...], "receivers": n}
    -> {"errors": [code, ...], "digests": [{name: digest}, ...], "device": where the targets lie}
{"do": "memory"} -> {"allocated", "used"} in bytes, of this process's tensors and of the whole device
{"do": "forget"} -> {}: closes the hub; another one is made when it is needed
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch

from transports.base import Box, Read
from transports.cuda_ipc import CudaIpcHub
from transports.digest import tensor_digest, to_hex
from transports.dtypes import TORCH_DTYPES
from transports.media.testing import FakeDevice
from transports.stream import StreamSource
from transports.testing.transfer import manifest_of
from updater.core.errors import LiveweightsError
from updater.core.participant import StreamOffer
from updater.protocol import wire
from updater.protocol.manifest import TensorSpec


class Rank:
    def __init__(self, stand_in: bool) -> None:
        self.device = torch.device("cpu" if stand_in else "cuda")
        self.memory = FakeDevice() if stand_in else None
        self.hub: CudaIpcHub | None = None

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "memory":
            return self.used()
        if order["do"] == "forget":
            if self.hub is not None:
                self.hub.close()
            self.hub = None
            return {}
        return self.read(order)

    def used(self) -> dict[str, Any]:
        if self.memory is not None:
            return {"allocated": self.memory.opened - self.memory.closed, "used": 0}
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {"allocated": torch.cuda.memory_allocated(), "used": total - free}

    def read(self, order: dict[str, Any]) -> dict[str, Any]:
        offer = wire.build(StreamOffer, order["offer"])
        specs = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in order["specs"])
        count = order["receivers"]
        errors, digests = [""] * count, [dict[str, str]() for _ in range(count)]
        threads = [
            threading.Thread(target=self.receive, args=(offer, number, specs, errors, digests))
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"errors": errors, "digests": digests, "device": self.device.type}

    def receive(
        self,
        offer: StreamOffer,
        number: int,
        specs: tuple[TensorSpec, ...],
        errors: list[str],
        digests: list[dict[str, str]],
    ) -> None:
        if self.hub is None:
            self.hub = CudaIpcHub(memory=self.memory)
        targets = {
            spec.name: torch.full((max(1, spec.nbytes),), 0xCD, dtype=torch.uint8, device=self.device)[: spec.nbytes]
            .view(TORCH_DTYPES[spec.dtype])
            .view(spec.shape)
            for spec in specs
        }
        source = StreamSource("cuda_ipc", manifest_of(specs), self.hub.receiver(offer, number))
        try:
            source.read([Read(name, Box.whole(target.shape), target) for name, target in targets.items()])
            digests[number] = {name: to_hex(tensor_digest(target)) for name, target in targets.items()}
        except LiveweightsError as error:
            errors[number] = error.code
        finally:
            source.close()


def main() -> int:
    rank = Rank(sys.argv[1] == "stand-in")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(rank.do(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
