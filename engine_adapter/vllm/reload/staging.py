"""The staging half of reload mode: what the front opens, reads and keeps open between a plan and its end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass, field

from engine_adapter.rank.plan import CancelToken
from engine_adapter.rank.state import wrong_phase
from engine_adapter.vllm.reload.source import (
    CheckpointContent,
    ReloadStart,
    differences,
    not_reloaded,
    open_folder,
    open_start,
    read_content,
    stored_specs,
)
from transports.disk.source import DiskSource
from updater.core.errors import Aborted, Failure, Rejected
from updater.core.participant import DiskOffer, PlanRequest, Progress


@dataclass(slots=True)
class Planned:
    """One update. `folder`: links resolved, for vLLM to read. `content`: once the front has read it."""

    request: PlanRequest
    source: DiskSource
    folder: str
    cancelled: threading.Event = field(default_factory=threading.Event)
    content: CheckpointContent | None = None
    read: int = 0

    @property
    def serial(self) -> int:
        return self.request.fence.serial

    @property
    def total(self) -> int:
        return sum(spec.nbytes for spec in self.source.specs.values())

    @property
    def staged(self) -> CheckpointContent:
        """Raises Aborted (`wrong_phase`) before it was read."""
        if self.content is None:
            raise wrong_phase(f"nothing is staged for serial {self.serial}")
        return self.content

    def count(self, nbytes: int) -> None:
        self.read += nbytes


class FrontStaging:
    """At most one update at a time. Lives on one event loop; files are opened and read beside it."""

    def __init__(self, model: str, roots: tuple[str, ...], device: str) -> None:
        self._model, self._roots, self._device = model, roots, device
        self._start: ReloadStart | None = None
        self._planned: Planned | None = None
        self._busy = asyncio.Lock()  # held by whichever verb opens, reads or closes files
        self._dropped = -1  # serial that was given up last

    async def read_start(self, deadline_s: float) -> CheckpointContent:
        """Of the start checkpoint, which all later ones are compared with. Raises LiveweightsError, also for models
        that vLLM does not reload whole.
        """
        self._start, content = await asyncio.to_thread(self._read_start, _stop(threading.Event(), deadline_s))
        return content

    def _read_start(self, stop: CancelToken) -> tuple[ReloadStart, CheckpointContent]:
        source, start = open_start(self._model, (self._model, *self._roots))
        with source:
            failures = not_reloaded(start, self._device)
            if failures:
                raise Rejected(*failures)
            return start, read_content(source, start.tied, True, stop, lambda _nbytes: None)

    async def open(self, request: PlanRequest, offer: DiskOffer) -> Planned:
        """Takes the place of whatever was planned. Reads no tensor byte. Raises LiveweightsError."""
        async with self._busy:
            self.close()
            planned = await asyncio.to_thread(self._open, request, offer)
            if self._dropped == planned.serial:  # it was overtaken while it waited its turn
                planned.source.close()
                raise Aborted(Failure("client_abort", "the update was dropped while it was planned"))
            self._planned = planned
            return planned

    def _open(self, request: PlanRequest, offer: DiskOffer) -> Planned:
        source = open_folder(offer.path, self._roots, request.manifest)
        failures = differences(stored_specs(source), self._known)
        if failures:
            source.close()
            raise Rejected(*failures)
        return Planned(request, source, os.path.realpath(offer.path))

    async def read(self, serial: int, deadline_s: float) -> Planned:
        """Raises LiveweightsError: `client_abort` after `cancel`, `phase_timeout`, and as `read_content`."""
        async with self._busy:
            planned, tied = self.planned(serial), self._known.tied
            planned.read = 0
            allowed, stop = planned.request.allow_nonfinite, _stop(planned.cancelled, deadline_s)
            planned.content = await asyncio.to_thread(read_content, planned.source, tied, allowed, stop, planned.count)
            return planned

    @property
    def _known(self) -> ReloadStart:
        if self._start is None:
            raise wrong_phase("the start checkpoint is not read yet")
        return self._start

    def planned(self, serial: int) -> Planned:
        """Raises Aborted (`wrong_phase`)."""
        if self._planned is None or self._planned.serial != serial:
            raise wrong_phase(f"nothing is planned for serial {serial}")
        return self._planned

    async def recheck(self, serial: int) -> None:
        """Raises Aborted (`source_changed`, `source_missing`) where other files lie there than were read."""
        await asyncio.to_thread(self.planned(serial).source.recheck)

    def cancel(self, serial: int) -> None:
        """What runs for `serial` ends soon."""
        self._dropped = serial
        if self._planned is not None and self._planned.serial == serial:
            self._planned.cancelled.set()

    async def drop(self, serial: int) -> None:
        self.cancel(serial)
        async with self._busy:
            if self._planned is not None and self._planned.serial == serial:
                self.close()

    def close(self) -> None:
        """No file stays open (I6)."""
        if self._planned is not None:
            self._planned.source.close()
            self._planned = None

    def progress(self) -> Progress | None:
        """Of the reading that runs."""
        planned = self._planned
        if planned is None or planned.content is not None or not planned.read:
            return None
        return Progress(planned.serial, planned.read, planned.total)


def _stop(cancelled: threading.Event, deadline_s: float) -> CancelToken:
    return CancelToken(cancelled.is_set, time.monotonic() + deadline_s, time.monotonic)
