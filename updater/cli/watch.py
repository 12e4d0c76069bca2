"""A folder that a trainer writes checkpoints into: each new version that is complete is published.

Complete means that the marker is there, which whoever writes a checkpoint writes last: the manifest of digests, unless
another file name is agreed on. What lies beside a marker and is not whole all the same is refused by the coordinator,
and offered again only once it has changed. Where no marker is ever written, `settle_s` takes a checkpoint whose files
have not changed for so long and fit their index.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from updater.core.errors import LiveweightsError
from updater.core.version import START, Version
from updater.manifest import FILE_NAME
from updater.schemas import Receipt, VersionState

_RUN_STEP = re.compile(r"(\d{1,18})-(\d{1,18})")
_STEP = re.compile(r"(?:step|checkpoint|ckpt|global_step|iter)[-_]?(\d{1,18})")

#: Name, size and time of change of every file of a checkpoint: what a writer that is at work cannot leave alone.
Signature = tuple[tuple[str, int, int], ...]


class Publisher(Protocol):
    """`trainer_side.Client`, as far as it is needed."""

    def version(self) -> VersionState: ...

    def update(self, body: Mapping[str, Any]) -> Receipt: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A folder whose name is a version. `run` None: of the run that is live."""

    path: Path
    run: int | None
    step: int

    def version(self, live: Version) -> Version:
        return Version(live.run if self.run is None else self.run, self.step)

    def signature(self) -> Signature:
        files = sorted(each for each in self.path.rglob("*") if each.is_file())
        return tuple(
            (str(each.relative_to(self.path)), s.st_size, s.st_mtime_ns) for each in files for s in (each.stat(),)
        )


def found_in(folder: Path) -> list[Found]:
    """Folders named `run-step`, `step-N`, `checkpoint-N`, `global_stepN` and the like."""
    result = []
    for path in folder.iterdir():
        if not path.is_dir():
            continue
        if match := _RUN_STEP.fullmatch(path.name):
            result.append(Found(path, int(match[1]), int(match[2])))
        elif match := _STEP.fullmatch(path.name):
            result.append(Found(path, None, int(match[1])))
    return result


class Watch:
    """`once` is one look. `policy`: as in the body of an update. `clock`: monotonic seconds."""

    def __init__(
        self,
        folder: Path,
        client: Publisher,
        *,
        marker: str = FILE_NAME,
        settle_s: float | None = None,
        policy: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._client = folder.resolve(), client
        self._marker, self._settle_s, self._policy = marker, settle_s, dict(policy or {})
        self._clock = clock
        self._refused: dict[Path, Signature] = {}
        self._seen: dict[Path, tuple[Signature, float]] = {}  # and since when

    def once(self) -> Receipt | None:
        """Publish the newest complete version above the live one, if there is one; those between are passed over.

        Raises LiveweightsError: what is refused for good is left alone until its files change, the rest is tried again
        at the next look.
        """
        live = Version.parse(self._client.version().version or str(START))
        newer = [each for each in found_in(self._folder) if each.version(live) > live]
        for found in sorted(newer, key=lambda each: each.version(live), reverse=True):
            signature = self._complete(found)
            if signature is not None and self._refused.get(found.path) != signature:
                return self._publish(found, found.version(live), signature)
        return None

    def _publish(self, found: Found, version: Version, signature: Signature) -> Receipt:
        body = {"path": str(found.path), "version": str(version), "policy": self._policy}
        try:
            return self._client.update(body)
        except LiveweightsError as error:
            if not error.retryable:
                self._refused[found.path] = signature
            raise

    def _complete(self, found: Found) -> Signature | None:
        try:
            signature = found.signature()
        except FileNotFoundError:  # it is being written, or taken away
            return None
        if any(name == self._marker for name, _, _ in signature):
            return signature
        return signature if self._settle_s is not None and self._settled(found.path, signature) else None

    def _settled(self, path: Path, signature: Signature) -> bool:
        """Unchanged for long enough, and as its index says."""
        from transports.inspect import inspect

        before, since = self._seen.get(path, ((), 0.0))
        if before != signature:
            self._seen[path] = (signature, self._clock())
            return False
        return self._clock() - since >= (self._settle_s or 0.0) and inspect(str(path)).sound


def run(watch: Watch, every_s: float, *, as_json: bool) -> None:
    """Look again and again until SIGTERM or Ctrl-C. What is under way then is waited for."""
    from updater.cli import views

    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not stop.is_set():
            try:
                receipt = watch.once()
            except LiveweightsError as error:
                views.error(error, as_json=as_json)
            else:
                if receipt is not None:
                    views.finished(receipt, as_json=as_json)
                    continue  # there may be a newer one by now
            stop.wait(every_s)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
