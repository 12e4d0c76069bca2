"""Manifests as files, named by their SHA-256: a model's may be megabytes, which a table row should not be."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

_DIGEST = re.compile(r"[0-9a-f]{64}")

#: Seconds that a file stays which nothing names: it was uploaded for an update that has yet to begin.
UNNAMED_S = 24 * 3600.0


class ManifestFiles:
    """Every method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept = ("", "")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, digest: str, text: str) -> None:
        """Durable on return. Raises ValueError if the text has another digest."""
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError("the text is not what its digest names")
        target = self._path(digest)
        if target.exists():
            os.utime(target)  # its time begins anew
            return
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, target)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def keep(self, text: str) -> str:
        """Keep a manifest and return its name. Called again with the last manifest, it neither hashes nor writes."""
        if text != self._kept[0]:
            digest = hashlib.sha256(text.encode()).hexdigest()
            self.put(digest, text)
            self._kept = (text, digest)
        return self._kept[1]

    def text(self, digest: str) -> str | None:
        if _DIGEST.fullmatch(digest) is None:
            return None
        path = self._path(digest)
        return path.read_text() if path.exists() else None

    def sweep(self, named: Collection[str], now: float) -> None:
        """Remove what no record names, and what a crash left half written, once it is old. `now`: Unix seconds."""
        with os.scandir(self._folder) as entries:
            old = [entry for entry in entries if now - entry.stat().st_mtime > UNNAMED_S]
        for entry in old:
            if entry.name.removesuffix(".json") not in named:
                os.unlink(entry.path)
                self._kept = ("", "")

    def _path(self, digest: str) -> Path:
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"not a digest: {digest[:80]!r}")
        return self._folder / f"{digest}.json"
