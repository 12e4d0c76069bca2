"""Load one rank's share of a model into memory of its own."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from engine_adapter.base import EngineSpec
from engine_adapter.groups import join_group
from engine_adapter.parameters import collect
from updater.core.errors import Failure, LiveweightsError

_DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Options:
    """`EngineSpec.options` of this engine, checked.

    `num_blocks` pages of `page_size` tokens of keys and values; `max_batch_tokens` per forward; `threads` of torch, 0
    means this rank's share of half the cores (busy threads of too many ranks only wait for each other); `sampling`
    allows temperature > 0 (then greedy means a temperature of almost zero); `group_timeout_s` bounds every collective
    between ranks, a pause included; `pause_grace_s` is how long a rank that another one stopped waits to be told to
    pause itself; `start_s` bounds meeting the other ranks and the first step.
    """

    num_blocks: int = 256
    page_size: int = 16
    max_batch_tokens: int = 512
    dtype: str = "auto"
    threads: int = 0
    sampling: bool = False
    prefix_sharing: bool = True
    group_timeout_s: float = 900.0
    pause_grace_s: float = 10.0
    start_s: float = 120.0

    @classmethod
    def of(cls, spec: EngineSpec) -> Options:
        """Raises LiveweightsError for an unknown option or a value of the wrong type."""
        known: dict[str, type] = {name: type(getattr(cls(), name)) for name in cls.__slots__}
        wrong = [
            name
            for name, value in spec.options.items()
            if name not in known
            or not (isinstance(value, known[name]) or (known[name] is float and type(value) is int))
        ]
        if wrong or spec.options.get("dtype", "auto") not in _DTYPES:
            raise LiveweightsError(Failure("bad_request", f"engine options {wrong or ['dtype']}; known: {known}"))
        return cls(**spec.options)  # type: ignore[arg-type]


def load_model(spec: EngineSpec, options: Options) -> Any:
    """The model of this rank, in eval mode, every fed tensor in private anonymous memory.

    At size > 1 all ranks must call this at about the same time: it joins the process group at `spec.rendezvous`.
    """
    library: Any = import_module("transformers")
    library.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads or max(1, len(os.sched_getaffinity(0)) // (2 * spec.size)))
    distributed = None
    _check_heads(library, spec)
    if spec.size > 1:
        _join_group(spec, options)
        distributed = import_module("transformers.distributed").DistributedConfig(tp_size=spec.size)
    try:
        model = library.AutoModelForCausalLM.from_pretrained(
            spec.model,
            dtype=_DTYPES[options.dtype],
            distributed_config=distributed,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        ).eval()
    except Exception as error:  # the boundary to a library, whose classes raise what they like
        raise LiveweightsError(_cannot_load(spec.model, error)) from error
    _own_memory(model)
    return model


def _check_heads(library: Any, spec: EngineSpec) -> None:
    """Ranks share out whole heads, of keys and values too: the library finds out only in its generation loop."""
    try:
        config = library.AutoConfig.from_pretrained(spec.model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise LiveweightsError(_cannot_load(spec.model, error)) from error
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % spec.size or kv_heads % spec.size:
        fits = [str(size) for size in range(1, kv_heads + 1) if heads % size == kv_heads % size == 0]
        why = f"{heads} heads over {kv_heads} heads of keys and values cannot be shared out over {spec.size} ranks"
        failure = Failure("placement_refused", why, file=spec.model, hint=f"start with --tp {' or '.join(fits)}")
        raise LiveweightsError(failure)


def _cannot_load(model: str, error: Exception) -> Failure:
    """With the file, where one of them is what failed: the library's error often names neither cause nor file."""
    for path in sorted(Path(model).glob("*.safetensors")):
        why, hint = _unreadable(path)
        if why:
            return Failure("placement_refused", why, file=str(path), hint=hint)
    return Failure("placement_refused", f"cannot load: {type(error).__name__}: {error}"[:2000], file=model)


def _unreadable(path: Path) -> tuple[str, str]:
    """(what is wrong with one file of weights, what helps); empty for a good one."""
    try:
        with open(path, "rb") as file:
            try:
                mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ).close()
            except OSError as cause:
                why = (
                    f"the storage of this file cannot be mapped into memory, which the library needs: {cause.strerror}"
                )
                return why, "copy the checkpoint to a local disk and start from there"
        with safe_open(path, "pt"):
            return "", ""
    except OSError as cause:
        return f"cannot be read: {cause.strerror}", ""
    except (ValueError, SafetensorError) as cause:  # an empty one cannot be mapped at all
        return f"is no whole safetensors file: {cause}", ""


def _join_group(spec: EngineSpec, options: Options) -> None:
    if dist.is_initialized():
        raise LiveweightsError(Failure("bad_request", "this process is in a process group already"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one replica share a machine: nothing listens outside
    join_group(spec, options.group_timeout_s, options.start_s)


def _own_memory(model: Any) -> None:
    """The loader may leave tensors in mapped files: one that is truncated later would kill the server (SIGBUS)."""
    for parameter in collect(model).values():
        parameter.rebind(parameter.local.clone())
