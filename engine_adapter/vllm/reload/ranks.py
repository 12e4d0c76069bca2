"""Reload mode: a replica whose ranks run nothing of ours, for releases of vLLM that were not tried.

The front proves what it can of a checkpoint, pauses the engine and has vLLM reload its weights by itself. What the
ranks made of it is not compared with anything and nothing is kept to go back to. Therefore a reload that fails, is
late or is to be taken back ends the replica: it stays shut until vLLM is started anew (fail-stop).
"""

from __future__ import annotations

import asyncio
import logging
import time

from engine_adapter.hosted.pool import ASLEEP
from engine_adapter.placement.suspicious import judge
from engine_adapter.rank.messages import RankHello, completed
from engine_adapter.replica.agreement import check_config
from engine_adapter.replica.interfaces import WorkDeadlines
from engine_adapter.vllm.control import VllmControl
from engine_adapter.vllm.gate import VllmGate
from engine_adapter.vllm.reload.source import CheckpointContent
from engine_adapter.vllm.reload.staging import FrontStaging, Planned
from updater.core.dtypes import Rules
from updater.core.errors import Aborted, Failure, Rejected, refuse
from updater.core.participant import (
    Compared,
    DiskOffer,
    FenceRequest,
    InvalidateRequest,
    JoinRequest,
    Kind,
    PauseReply,
    PauseRequest,
    PlanReply,
    PlanRequest,
    Progress,
    RankInfo,
    ResumeRequest,
    StageReply,
    StageRequest,
    VerifyReply,
    VerifyRequest,
)
from updater.core.policy import CachePolicy, Capabilities, InFlight, InstallMode, Policy
from updater.core.version import START
from updater.protocol.model_document import ModelDocument, config_hash

_log = logging.getLogger("liveweights.front")

NAME = "vllm-reload"
#: What every receipt of this mode says.
WARNINGS = (
    "reload mode: ranks are NOT verified; vLLM reads the files by itself, and what it made of them is not compared",
    "reload mode: no way back is kept; a reload that fails leaves the replica shut until vLLM is started anew",
)
_CELLS = ((InFlight.DRAIN, CachePolicy.RESET), (InFlight.ABORT, CachePolicy.RESET))


def capabilities(notes: tuple[str, ...] = ()) -> Capabilities:
    """`notes`: why this mode, beside what it lacks."""
    return Capabilities(cells=_CELLS, install=(InstallMode.NONE,), transports=("disk",), notes=(*notes, *WARNINGS))


class ReloadControl(VllmControl):
    """Of workers that have no extension."""

    async def reload(self, folder: str, deadline_s: float) -> None:
        """While paused: every worker reads `folder`. Raises Aborted; the engine's weights are then of no version."""
        call = self._client.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        await self._within(call, "reload_weights", deadline_s)

    async def _stand(self, number: int) -> None:
        """No rank there can note it."""


class ReloadRanks:
    """Implements `engine_adapter.replica.interfaces.RankVerbs`. Lives on one event loop; files are read beside it.

    `model`: folder of the start checkpoint. `roots`: that sources may lie under. `hellos`: see `make_hellos`; their
    notes go into every receipt. `reload_s`: how long one reload may take.
    """

    def __init__(
        self,
        control: ReloadControl,
        gate: VllmGate,
        model: str,
        roots: tuple[str, ...],
        hellos: tuple[RankHello, ...],
        *,
        reload_s: float = 600.0,
        deadlines: WorkDeadlines | None = None,
        knows_config: object = None,
    ) -> None:
        self._control, self._gate = control, gate
        self._model = model
        self._reload_s = reload_s
        self._deadlines = deadlines or WorkDeadlines()
        self.hellos = hellos
        self.dtypes: Rules = ()  # vLLM's own loaders decide
        self._files = FrontStaging(model, roots, hellos[0].info.device)
        self._live: CheckpointContent | None = None
        self._knows_config = knows_config
        self._in_doubt = ""  # since a reload began, until it is published: what became of it

    # --- start

    async def replay_start(self) -> str:
        """Read the start checkpoint, and have vLLM do once what every publication will ask of it, while no request is
        served: a release that cannot is refused here. Returns its content digest.
        """
        self._live = await self._files.read_start(self._deadlines.start_s)
        digest = self._live.observed
        began = time.monotonic()
        await self._pause(self._deadlines.commit_s)
        await self._control.reload(self._model, self._reload_s)
        _log.info("vLLM reloads in %.1f s here: pause_lease_s has to be longer", time.monotonic() - began)
        await self._relabel(str(START), digest)
        await self._clear()
        await self._control.resume(self._deadlines.commit_s)
        return digest

    async def join(self, request: JoinRequest) -> None:
        """The live bytes are the fleet's: carry its label from now on. No request is served yet."""
        await self._relabel(request.version, request.digest)

    async def _relabel(self, version: str, digest: str) -> None:
        await self._control.label(version, self._deadlines.commit_s)
        self._gate.relabelled(version, digest, CachePolicy.RESET)

    # --- the transaction

    async def plan(self, request: PlanRequest) -> PlanReply:
        began = time.monotonic()
        update = await self._files.open(request, self._plain(request))
        notes, compared = await asyncio.to_thread(self._check_config, update, request)
        manifest = update.source.manifest
        return PlanReply(
            fence=request.fence,
            manifest_digest="" if manifest is None else manifest.digest,
            tensors=len(update.source.specs),
            bytes_to_read=update.total,
            install=InstallMode.NONE,
            warnings=(*self.hellos[0].capabilities.notes, *update.source.warnings, *notes),
            seconds=time.monotonic() - began,
            compared=compared,
        )

    def _check_config(self, update: Planned, request: PlanRequest) -> tuple[tuple[str, ...], Compared]:
        """Reads files: not on the event loop."""
        known = request.kind is Kind.CATCH_UP
        theirs = None if known else completed(update.source.document(), self._knows_config)
        return check_config(theirs, self.hellos, request)

    def _plain(self, request: PlanRequest) -> DiskOffer:
        """Raises Rejected for everything that this mode does not do."""
        if request.kind is Kind.ROLLBACK:
            raise refuse("no_rollback", "vLLM's own reload keeps nothing to go back to")
        if request.offer is None:
            raise refuse("bad_request", "an update needs an offer")
        if not isinstance(request.offer, DiskOffer):
            raise refuse("transport_unsupported", f"{request.offer.kind}: vLLM's own reload reads from disk only")
        if request.require_digests:
            raise refuse("mode_unsupported", "require_digests: vLLM's own reload proves no digest on its ranks")
        policy = Policy(in_flight=request.in_flight, cache=request.cache, install=request.install)
        unsupported = self.hellos[0].capabilities.refuses(policy, request.offer.kind)
        if unsupported is not None:
            hint = self.hellos[0].capabilities.offers()
            raise refuse("mode_unsupported", f"vLLM's own reload does not support {unsupported}", hint=hint)
        return request.offer

    async def stage(self, request: StageRequest) -> StageReply:
        """Nothing to stage into: the front reads the source to know what vLLM will read."""
        began = time.monotonic()
        update = await self._files.read(request.fence.serial, request.deadline_s)
        return StageReply(request.fence, update.read, time.monotonic() - began)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Says what the front read, which no rank has compared with anything."""
        began = time.monotonic()
        content = self._files.planned(request.fence.serial).staged
        await self._files.recheck(request.fence.serial)
        live = self._live.digests if self._live is not None else {}
        refused, noted = self._suspicious(request.fence.serial, content)
        if refused:
            raise Rejected(*refused)
        changed = sum(live.get(name) != digest for name, digest in content.digests.items())
        return VerifyReply(
            fence=request.fence,
            observed=content.observed,
            proof="structure_only",
            tensors_changed=changed,
            warnings=(*(() if changed else ("no tensor changed",)), *noted),
            seconds=time.monotonic() - began,
        )

    def _suspicious(self, serial: int, content: CheckpointContent) -> tuple[tuple[Failure, ...], tuple[str, ...]]:
        """As ranks judge it, over what the front read: (refusals, warnings)."""
        update = self._files.planned(serial)
        if self._live is None or update.request.kind is Kind.CATCH_UP:
            return (), ()
        manifest = update.source.manifest
        promised = {} if manifest is None else {entry.name: entry.digest for entry in manifest.tensors}
        return judge(sorted(content.blank - self._live.blank), promised, update.request.allow_suspicious)

    async def pause(self, request: PauseRequest, digest: str, aborted: int, requeued: int) -> PauseReply:
        """Raises Aborted (`source_changed`, `source_missing`) where vLLM would not read what was verified."""
        began = time.monotonic()
        serial = request.fence.serial
        await self._gate.quiesce(request.in_flight, request.quiesce_s)
        await self._files.recheck(serial)
        await self._pause(max(0.05, began + request.quiesce_s - time.monotonic()))
        return PauseReply(
            fence=request.fence,
            staged_serial=serial,
            staged_digest=digest,
            step=0,
            asleep=False,
            aborted=aborted,
            requeued=requeued,
            seconds=time.monotonic() - began,
        )

    async def _pause(self, deadline_s: float) -> None:
        if not await self._control.pause(0, deadline_s):
            raise Aborted(ASLEEP)

    async def install(self, request: FenceRequest, plan: PlanRequest, digest: str) -> None:
        """From the first word to vLLM on, only a publication makes this replica serve again."""
        update = self._files.planned(request.fence.serial)
        content = update.staged
        self._in_doubt = f"{plan.version} was reloaded and not published"
        try:
            await self._control.reload(update.folder, self._reload_s)
            await self._files.recheck(update.serial)  # it read what was verified
            await self._relabel(plan.version, digest)
        except Aborted as error:
            self._in_doubt = str(error)
            raise
        self._live = content

    async def invalidate(self, request: InvalidateRequest) -> None:
        await self._clear()

    async def _clear(self) -> None:
        cleared = await self._control.reset_caches(self._deadlines.commit_s)
        left = [tier for tier, done in cleared.items() if not done]
        if left:
            raise Aborted(*(Failure("cache_not_reset", f"the cache tier {tier!r} did not clear") for tier in left))

    async def restore(self, serial: int, attempt: int, version: str, digest: str) -> None:
        """Raises Aborted once a reload began: nothing is there to go back to."""
        if self._in_doubt:
            self._files.close()
            why = f"{self._in_doubt}; vLLM's own reload keeps nothing to go back to: start it anew"
            raise Aborted(Failure("no_rollback", why))
        await self.discard(serial)

    async def resume(self, request: ResumeRequest) -> None:
        if request.published:
            self._gate.before_switch(request.version)
            self._in_doubt = ""
            self._files.close()
        if self._in_doubt:  # vLLM ends itself over weights that a failed reload left behind
            raise Aborted(Failure("no_rollback", self._in_doubt))
        await self._control.resume(self._deadlines.commit_s)

    async def discard(self, serial: int) -> None:
        await self._files.drop(serial)

    def cancel(self, serial: int) -> None:
        self._files.cancel(serial)

    def progress(self) -> Progress | None:
        return self._files.progress()

    async def audit(self, what: str) -> tuple[Failure, ...]:
        """Live bytes cannot be compared here, and nothing else is kept."""
        return ()

    # --- asked by an operator

    async def readmit(self, unsettled: tuple[int, int] | None, serial: int, version: str, digest: str) -> None:
        raise self._unproven()

    async def serve_installed(self, serial: int, attempt: int, version: str) -> None:
        raise self._unproven()

    def _unproven(self) -> Rejected:
        why = f"{self._in_doubt}; " if self._in_doubt else ""
        return refuse("mode_unsupported", f"{why}reload mode cannot prove what its ranks hold: start vLLM anew")

    # --- in the place of a pool

    async def start(self, deadline_s: float) -> tuple[RankHello, ...]:
        """No worker attaches."""
        return self.hellos

    async def stop(self) -> None:
        self._files.close()


def make_hellos(size: int, device: str, model: ModelDocument, notes: tuple[str, ...]) -> tuple[RankHello, ...]:
    """What ranks would say that do not speak with us: no process ids, no bytes. `notes`: why this mode."""
    can = capabilities(notes)
    name = config_hash(model)
    return tuple(RankHello(RankInfo(rank, 0, 0, 0, device), size, NAME, can, name, model) for rank in range(size))
