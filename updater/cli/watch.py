"""A folder that a trainer writes checkpoints into: each new version that is complete is published.

Complete means that the marker is there, which the writer of a checkpoint writes last: the manifest of digests, unless
another file name is agreed on. What lies beside a marker and is not whole all the same is refused by the coordinator,
and offered again only once it has changed. Where no marker is ever written, `settle_s` takes a checkpoint whose files
have not changed for so long and fit their index. What is passed over is named once, with the reason.

A trainer that starts again from an older step writes below what is live. `new_run` opens the next run with what changed
last; what lies there from before is of the old run, whatever its step.
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

from updater.core.errors import LiveweightsError, Unauthorized, grouped, told
from updater.core.version import START, Version
from updater.protocol.answers import Receipt, VersionState
from updater.protocol.manifest import FILE_NAME

_RUN_STEP = re.compile(r"(\d{1,18})-(\d{1,18})")
_STEP = re.compile(r"(?:step|checkpoint|ckpt|global_step|iter)[-_]?(\d{1,18})")

#: What a folder holds that is an adapter.
ADAPTER = frozenset({"adapter_config.json", "adapter_model.safetensors"})
#: Name, size and time of change of every file of a checkpoint: what a writer that is at work cannot leave alone.
Signature = tuple[tuple[str, int, int], ...]


class Publisher(Protocol):
    """`trainer_side.Client`, as far as it is needed."""

    def version(self) -> VersionState: ...

    def update(self, body: Mapping[str, Any]) -> Receipt: ...


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A folder whose name is a version. `run` None: of the run that is live."""

    path: Path
    run: int | None
    step: int

    def version(self, live: Version) -> Version:
        return Version(live.run if self.run is None else self.run, self.step)

    def touched(self) -> int:
        """When a file of it was written last, in ns; 0 where none is there."""
        try:
            return max((time_ns for _, _, time_ns in self.signature()), default=0)
        except FileNotFoundError:
            return 0

    def signature(self) -> Signature:
        files = sorted(each for each in self.path.rglob("*") if each.is_file())
        return tuple(
            (str(each.relative_to(self.path)), s.st_size, s.st_mtime_ns) for each in files for s in (each.stat(),)
        )


def found_in(folder: Path) -> list[FoundCheckpoint]:
    """Folders named `run-step`, `step-N`, `checkpoint-N`, `global_stepN` and the like."""
    result = []
    for path in folder.iterdir():
        if not path.is_dir():
            continue
        if match := _RUN_STEP.fullmatch(path.name):
            result.append(FoundCheckpoint(path, int(match[1]), int(match[2])))
        elif match := _STEP.fullmatch(path.name):
            result.append(FoundCheckpoint(path, None, int(match[1])))
    return result


class Watch:
    """`once` is one look. `policy`: as in the body of an update. `clock`: monotonic seconds.

    `new_run`: the first that is published opens the next run. `told`: hears (folder, why) of what is passed over, once
    for each reason.
    """

    def __init__(
        self,
        folder: Path,
        client: Publisher,
        *,
        marker: str = FILE_NAME,
        settle_s: float | None = None,
        policy: Mapping[str, Any] | None = None,
        new_run: bool = False,
        told: Callable[[Path, str], None] = lambda _path, _why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._client = folder.resolve(), client
        self._marker, self._settle_s, self._policy = marker, settle_s, dict(policy or {})
        self._new_run, self._since = new_run, 0  # what was written before belongs to an older run
        self._told, self._clock = told, clock
        self._refused: dict[Path, Signature] = {}
        self._seen: dict[Path, tuple[Signature, float]] = {}  # and since when
        self._passed: dict[Path, str] = {}
        self.waiting = False  # in the last look something was newer and not known to be at rest
        self.left = False  # or newer and not whole

    def once(self) -> Receipt | None:
        """Publish the newest complete version above the live one, if there is one; those between are passed over.

        Raises LiveweightsError where nothing could be published: what is refused for good is left alone until its
        files change, the rest is tried again at the next look.
        """
        live = Version.parse(self._client.version().version or str(START))
        self.waiting = self.left = False
        refused: LiveweightsError | None = None
        for found in self._newer(live):
            signature = self._complete(found)
            if signature is None:
                continue
            if self._refused.get(found.path) == signature:
                self.left = True
                continue
            try:
                return self._publish(found, found.version(live), signature)
            except LiveweightsError as error:
                if error.retryable or error.status != 422:
                    raise
                self._pass(found.path, str(error))
                refused = refused or error  # an older one may be whole
        if refused is not None:
            raise refused
        return None

    def _newer(self, live: Version) -> list[FoundCheckpoint]:
        """Newest first: by version, of a run that is still to be opened by time."""
        found = [each for each in found_in(self._folder) if not self._since or each.touched() >= self._since]
        if self._new_run:
            return sorted((each for each in found if each.run is None), key=FoundCheckpoint.touched, reverse=True)
        newest = max(found, key=FoundCheckpoint.touched, default=None)
        if newest is not None and newest.version(live) < live:
            # What is written last is older than what is live: a trainer began again.
            hint = "a run that began again at an older step needs --new-run"
            self._pass(newest.path, f"{newest.version(live)} is below {live}, which is live. Hint: {hint}")
        newer = [each for each in found if each.version(live) > live]
        return sorted(newer, key=lambda each: each.version(live), reverse=True)

    def _publish(self, found: FoundCheckpoint, version: Version, signature: Signature) -> Receipt:
        body: dict[str, Any] = {"path": str(found.path), "version": str(version), "policy": self._policy}
        if self._new_run:
            body |= {"version": found.step, "policy": {**self._policy, "new_run": True}}
        since = found.touched()
        try:
            receipt = self._client.update(body)
        except LiveweightsError as error:
            if not error.retryable:
                self._refused[found.path] = signature
            raise
        if self._new_run:
            self._new_run, self._since = False, since
        return receipt

    def _complete(self, found: FoundCheckpoint) -> Signature | None:
        try:
            signature = found.signature()
        except FileNotFoundError:  # it is being written, or taken away
            return None
        if any(name in ADAPTER for name, _, _ in signature):
            self._leave(found.path, "an adapter, not a model: merge it into its base first")
            return None
        if any(name == self._marker for name, _, _ in signature):
            return signature
        if self._settle_s is None:
            self._leave(found.path, f"no {self._marker}, which is written last; --settle SECONDS takes it without")
            return None
        return signature if self._settled(found.path, signature, self._settle_s) else None

    def _settled(self, path: Path, signature: Signature, settle_s: float) -> bool:
        """Unchanged for long enough, and as its index says."""
        from transports.disk.report import inspect

        before, since = self._seen.get(path, (None, 0.0))
        if before != signature:
            before, since = self._seen[path] = (signature, self._clock())
        if self._clock() - since < settle_s:
            self.waiting = True
            return False
        faults = inspect(str(path)).faults
        if faults:
            self._leave(path, f"not whole: {told(grouped(faults))}")
        return not faults

    def _leave(self, path: Path, why: str) -> None:
        self.left = True
        self._pass(path, why)

    def _pass(self, path: Path, why: str) -> None:
        if self._passed.get(path) != why:
            self._passed[path] = why
            self._told(path, why)


def look_once(watch: Watch, settle_s: float | None) -> Receipt | None:
    """One look; a second one if that is what it takes to see that a folder is at rest."""
    receipt = watch.once()
    if receipt is None and watch.waiting:
        time.sleep(settle_s or 0.0)
        receipt = watch.once()
    return receipt


def run(watch: Watch, every_s: float, *, as_json: bool) -> None:
    """Look again and again until SIGTERM or Ctrl-C. What is under way then is waited for.

    Raises Unauthorized; any other error is shown, once until another one comes, and the next look may go better.
    """
    from updater.cli import views

    stop, last = threading.Event(), ""
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not stop.is_set():
            try:
                receipt = watch.once()
            except Unauthorized:
                raise
            except LiveweightsError as error:
                if str(error) != last:
                    views.error(error, as_json=as_json)
                last = str(error)
            else:
                last = ""
                if receipt is not None:
                    views.finished(receipt, as_json=as_json)
                    continue  # there may be a newer one by now
            stop.wait(every_s)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
