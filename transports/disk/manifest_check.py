"""The manifest that comes with a source: loaded, its names cleaned, compared with what the files say of themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from transports.disk.hashes import FolderHashes
from transports.disk.paths import OpenFile, read_text
from updater.core.errors import Failure, refuse
from updater.protocol import wire
from updater.protocol.manifest import FILE_NAME, Manifest, TensorSpec
from updater.protocol.names import clean_names

MANIFEST_LIMIT = 256 << 20


def load_manifest(
    folder: str, roots: Sequence[str], text: str, watched: list[OpenFile] | None = None
) -> Manifest | None:
    """From `text`, else from the file in `folder`, else None; names cleaned of trainer wrappers.

    The opened file is added to `watched`, or closed. Raises Rejected `manifest_invalid`, or what cleaning finds.
    """
    path = os.path.join(folder, FILE_NAME)
    if not text:
        if not os.path.lexists(path):
            return None
        text, opened = read_text(path, roots, MANIFEST_LIMIT, FILE_NAME)
        if watched is None:
            os.close(opened.fd)
        else:
            watched.append(opened)
    try:
        return cleaned(Manifest.from_json(text))
    except wire.WireError as error:
        raise refuse("manifest_invalid", f"field {error.where or '(top)'}: {error.why}", file=FILE_NAME) from None


def cleaned(manifest: Manifest) -> Manifest:
    """With the names that an engine's loader knows."""
    names = clean_names(entry.name for entry in manifest.tensors)
    if all(raw == clean for raw, clean in names.items()):
        return manifest
    entries = (replace(entry, name=names[entry.name]) for entry in manifest.tensors)
    ties = tuple((names.get(alias, alias), names.get(name, name)) for alias, name in manifest.ties)
    return replace(manifest, tensors=tuple(sorted(entries, key=lambda entry: entry.name)), ties=ties)


def manifest_faults(manifest: Manifest, specs: Mapping[str, TensorSpec], beside: FolderHashes) -> list[Failure]:
    """Everything in which a source differs from what its manifest promises, without looking at tensor bytes."""
    faults = []
    promised = manifest.specs()
    for name, spec in promised.items():
        found = specs.get(name)
        if found is None:
            faults.append(Failure("manifest_mismatch", "in the manifest, not in the files", tensor=name))
        elif found != spec:
            text = f"the manifest says {spec.dtype} {list(spec.shape)}, the file {found.dtype} {list(found.shape)}"
            faults.append(Failure("manifest_mismatch", text, tensor=name))
    for name in specs:
        if name not in promised:
            faults.append(Failure("manifest_mismatch", "in the files, not in the manifest", tensor=name))
    pairs = (
        ("config", manifest.config_hash, beside.config),
        ("tokenizer", manifest.tokenizer_hash, beside.tokenizer),
        ("quantization", manifest.quantization_hash, beside.quantization),
    )
    for what, wanted, there in pairs:
        if wanted and there and wanted != there:
            faults.append(Failure("config_mismatch", f"{what} beside the weights is not the manifest's", file=what))
    return faults
