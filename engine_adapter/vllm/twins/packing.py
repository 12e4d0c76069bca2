"""The dtype that int8 kernels are packed for, where vLLM takes it from torch's default dtype.

That default belongs to the whole process, and a state is built while the engine serves. What a mode of torch's sees and
changes are the calls of its own thread: nothing is set that another thread could read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MAKER, _ARGUMENT = "create_onednn_scaled_mm_handler", "output_type"


class PackedFor(TorchFunctionMode):
    """Inside, oneDNN kernels for int8 that this thread makes are packed for `dtype`.

    `made`: how many. None means that vLLM packs in another way, and for whatever dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self.made = dtype, 0
        self._maker: Any = getattr(torch.ops._C, _MAKER, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = list(args), dict(kwargs or {})
        if func is self._maker:
            self.made += 1
            at = [argument.name for argument in func.default._schema.arguments].index(_ARGUMENT)
            if at < len(given):
                given[at] = self._dtype
            else:
                named[_ARGUMENT] = self._dtype
        return func(*given, **named)
