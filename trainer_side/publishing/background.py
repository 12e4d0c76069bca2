"""Publishing a copy of the weights while training goes on: the copy is made now, the rest happens in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from trainer_side.client.request import PushRequest
from trainer_side.publishing.backends import PushBackends
from trainer_side.publishing.disk import DiskPush
from trainer_side.publishing.publish import LeaderSteps, PushBackend, follow, publish
from trainer_side.ranks.agreement import RankAgreement
from trainer_side.ranks.iterate import digests_of, iterate_in_step
from trainer_side.sources.source import WeightSource, model_of
from updater.core.errors import refuse
from updater.protocol.answers import Receipt
from updater.protocol.manifest import TensorSpec

#: What is left to do once the copy is made.
Rest = Callable[[], Receipt]


class Background:
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._last: Future[Receipt] | None = None

    def settle(self) -> None:
        """Wait for what was begun, however it ends.

        Another push begins after it on every rank: their threads and groups would meet in another order on each.
        """
        if self._last is not None:
            wait([self._last])

    def begin(self, rest: Rest) -> Future[Receipt]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="liveweights-push")
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> Receipt:
            if device is not None:
                torch.cuda.set_device(device)
            return rest()

        self._last = self._threads.submit(run)
        return self._last

    def close(self) -> None:
        """What was begun is waited for."""
        if self._threads is not None:
            self._threads.shutdown()


def copied(source: WeightSource, request: PushRequest, backends: PushBackends) -> Rest:
    """Copy `source`, which may be written to when this returns. Collective; raises the same on every rank."""
    team, later = RankAgreement(source.group), RankAgreement(source.group, "background")
    kind = team.lead((lambda: {"kind": backends.kind()}) if source.is_sender else None)["kind"]
    if kind == "disk":
        return _written(source, request, backends, team, later)
    device = None if kind == "cuda_ipc" else "cpu"
    snapshot = Snapshot(source, lambda tensor: tensor.to(device or tensor.device, copy=True), team)
    return lambda: publish(snapshot, lambda known: backends.sending(snapshot, known, request), team=later)


def _written(
    source: WeightSource, request: PushRequest, backends: PushBackends, team: RankAgreement, later: RankAgreement
) -> Rest:
    """The copy is the folder that the fleet will read."""
    known = digests_of(source, team)
    with LeaderSteps(team, source.is_sender) as leading:
        leading.make(lambda: backends.writing(source, known, request))
        failed = iterate_in_step(source, leading.sending, team)
        if failed is not None:
            raise failed
        told = leading.step(lambda sending: {"folder": str(_folder_of(sending).written())})
    folder = Path(told["folder"])
    return lambda: follow(lambda: backends.written(folder, request), source.is_sender, later)


def _folder_of(sending: PushBackend) -> DiskPush:
    if not isinstance(sending, DiskPush):
        raise refuse("wrong_phase", "not a folder")
    return sending


class Snapshot:
    """A `WeightSource` of what `source` held when this was made. The sending rank keeps whole tensors, the others none.

    `copy`: one tensor, to where it is kept. Making it is collective for the ranks of `team`; raises the same on all.
    """

    def __init__(self, source: WeightSource, copy: Callable[[torch.Tensor], torch.Tensor], team: RankAgreement) -> None:
        self.is_sender, self.group = source.is_sender, source.group
        self.specs: Mapping[str, TensorSpec] = dict(source.specs)
        self.ties = source.ties
        self.model = model_of(source)
        self._digests = dict(digests_of(source, team))
        self._kept: dict[str, torch.Tensor] = {}
        self._copy = copy
        failed = iterate_in_step(source, self if self.is_sender else None, team)
        if failed is not None:
            raise failed

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._kept[name] = self._copy(tensor.detach())

    def digests(self) -> Mapping[str, str]:
        return self._digests

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Once: what was sent is not kept."""
        for name in self.specs:
            yield name, self._kept.pop(name, None)

    def check_untouched(self) -> None:
        """No other code has it."""
