"""Tensor names as an engine's loader knows them: the wrappers that trainers put around modules are taken off.

One function for every way in: a pushed state dict and a folder named in a request get the same names.
"""

from __future__ import annotations

from collections.abc import Iterable

from updater.core.errors import Failure, Rejected

#: Wrapper modules that may sit at any depth: sharded data parallel, compiled, activation checkpointing.
_ANYWHERE = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})

#: Wrappers that are only ever outermost; `module` and `base_model` also are honest names further in.
_LEADING: tuple[tuple[str, ...], ...] = (("module",), ("base_model", "model"))

#: The frozen layer inside an adapter's layer.
_INNER = "base_layer"

#: Parts that belong to an adapter and not to the model.
_ADAPTER = frozenset(
    {
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "ia3_l",
        "modules_to_save",
        "original_module",
        "prompt_embeddings",
    }
)


def clean_name(name: str) -> str:
    """`name` without trainer wrappers, in any order and nesting. Cleaning twice changes nothing."""
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    leading = True
    while leading:
        leading = False
        for prefix in _LEADING:
            if len(parts) > len(prefix) and tuple(parts[: len(prefix)]) == prefix:
                parts, leading = parts[len(prefix) :], True
    kept = [part for at, part in enumerate(parts) if part != _INNER or at in (0, len(parts) - 1)]
    return ".".join(kept) or name


def is_adapter(name: str) -> bool:
    """Whether the tensor belongs to an adapter (LoRA and its relatives), which is not loaded like weights."""
    return not _ADAPTER.isdisjoint(name.split("."))


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """raw name -> clean name, in the order given.

    Raises Rejected: `tensor_duplicate`, one failure per raw name, where two names become one or a name is repeated;
    `adapter_unsupported` for tensors of an adapter. Everything that is wrong is listed.
    """
    cleaned: dict[str, str] = {}
    owners: dict[str, str] = {}
    failures: dict[tuple[str, str], Failure] = {}
    for raw in names:
        clean = clean_name(raw)
        if is_adapter(raw):
            failures[raw, "adapter"] = Failure("adapter_unsupported", "belongs to an adapter", tensor=raw)
        other = owners.setdefault(clean, raw)
        if other != raw or raw in cleaned:
            for one in (other, raw):
                text = f"{other} and {raw} both name {clean}"
                failures[one, "duplicate"] = Failure("tensor_duplicate", text, tensor=one)
        cleaned[raw] = clean
    if failures:
        raise Rejected(*failures.values())
    return cleaned
