"""One life of our front beside one vLLM engine: with our ranks in its workers, or in reload mode without them."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from engine_adapter.hosted.pool import AttachedPool
from engine_adapter.rank.messages import running_document
from engine_adapter.replica.app import ReplicaApp
from engine_adapter.replica.lifecycle import Membership, ReplicaLifecycle
from engine_adapter.replica.rank_work import RankWork
from engine_adapter.vllm import settings as settings_of
from engine_adapter.vllm.configs import ServerConfig
from engine_adapter.vllm.connectors import connectors
from engine_adapter.vllm.control import VllmControl
from engine_adapter.vllm.gate import VllmGate
from engine_adapter.vllm.private import check_server, choose_mode, installed_version, model_folder
from engine_adapter.vllm.reload.ranks import ReloadControl, ReloadRanks, make_hellos
from engine_adapter.vllm.settings import Mode
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.server.security import ConfigurationError

_log = logging.getLogger("liveweights.front")


class VllmReplica:
    """`client`: vLLM's `EngineClient`. `args`: of `vllm serve`. Raises ConfigurationError for a server that cannot be a
    replica.
    """

    def __init__(self, client: Any, args: Namespace) -> None:
        wanted = self.settings = settings_of.read(args)
        mode, why = choose_mode(wanted.mode, installed_version())
        check_server(client, args, mode)
        model = model_folder(client.vllm_config.model_config)
        tiers = connectors(client.vllm_config, wanted.allow_kv_connector)
        tiers.check()
        for warning in tiers.warnings:
            _log.warning("%s: %s", wanted.replica, warning)
        control = ReloadControl(client) if mode is Mode.RELOAD else VllmControl(client)
        self._control = control
        self.gate = VllmGate(control.abort, wanted.limits)
        client.generate = self.gate.gating(client.generate)
        client.encode = self.gate.gating(client.encode)
        self.face = ReplicaApp(wanted.replica, self.gate)
        roots = (*(str(Path(root).resolve()) for root in wanted.roots), *_blobs(model))
        membership = Membership(wanted.replica, wanted.url, str(model), wanted.coordinator, wanted.tokens.admin)
        self._pool: AttachedPool | ReloadRanks
        work: RankWork | ReloadRanks
        self._pool, work = (
            self._reloading(client.vllm_config, control, model, roots, (*why, *tiers.warnings))
            if isinstance(control, ReloadControl)
            else self._staged(client.vllm_config, control, model, roots, tiers.warnings)
        )
        self._life = ReplicaLifecycle(membership, work, self.gate, self.face)
        self._joining: asyncio.Task[bool] | None = None

    def _staged(
        self, config: Any, control: VllmControl, model: Path, roots: tuple[str, ...], warnings: tuple[str, ...]
    ) -> tuple[AttachedPool, RankWork]:
        pool = AttachedPool(
            control,
            str(model),
            int(config.parallel_config.world_size),
            {"spare": self.settings.spare.value, "allow_kv_connector": ",".join(self.settings.allow_kv_connector)},
            on_death=lambda failure: self._life.rank_died(failure),
            on_staged=lambda rank, staged: work.on_staged(rank, staged),
            relabelled=self.gate.relabelled,
        )
        work = RankWork(pool, self.gate, str(model), roots, warnings=warnings)
        return pool, work

    def _reloading(
        self, config: Any, control: ReloadControl, model: Path, roots: tuple[str, ...], why: tuple[str, ...]
    ) -> tuple[ReloadRanks, ReloadRanks]:
        """One object in the place of both."""
        size, device = int(config.parallel_config.world_size), str(config.device_config.device_type)
        knows = ServerConfig(config.model_config)
        hellos = make_hellos(size, device, running_document(str(model), knows), why)
        for note in hellos[0].capabilities.notes:
            _log.warning("%s: %s", self.settings.replica, note)
        ranks = ReloadRanks(
            control, self.gate, str(model), roots, hellos, reload_s=self.settings.reload_s, knows_config=knows
        )
        return ranks, ranks

    async def check(self) -> None:
        """Before the server listens. Raises ConfigurationError for a model that no publication could reach."""
        if isinstance(self._pool, AttachedPool):
            try:
                await self._control.check(self.settings.start_s)
            except Aborted as error:
                why = "; ".join(dict.fromkeys(failure.message for failure in error.failures))
                raise ConfigurationError(f"liveweights cannot serve here: {why}") from None

    def begin(self) -> None:
        """The server listens, shut: attach to the workers, prove the start checkpoint, join."""
        self._joining = asyncio.create_task(self._join())

    async def _join(self) -> bool:
        joined = await self._start_and_join()
        if not joined:
            self._life.keep_asking()
        return joined

    async def _start_and_join(self) -> bool:
        try:
            hellos = await self._pool.start(self.settings.start_s)
            _log.info("%s: %d ranks, %s", self.settings.replica, len(hellos), hellos[0].engine)
            return await self._life.start_and_join()
        except LiveweightsError as error:
            self._life.refuse(error)
        except Exception as error:  # no code awaits this task: unreported, the replica would be joining for ever
            _log.exception("%s cannot join", self.settings.replica)
            self._life.refuse(LiveweightsError(Failure("internal", f"{type(error).__name__}: {error}")))
        return False

    async def stop(self) -> None:
        """The server ends."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        await self._life.stop(self.settings.stop_s)
        await self._pool.stop()


def _blobs(model: Path) -> tuple[str, ...]:
    """A hub snapshot consists of links into its repository's blobs."""
    return (str(model.parent.parent),) if model.parent.name == "snapshots" else ()
