"""Cache tiers outside vLLM's own: its KV connectors, and what of an older version each of them can answer with.

vLLM counts a connector that has no reset as one that was reset, so nothing that it says tells them apart. The table
does, by class. What is no cache of prompts at all (transfers from another engine, dummy values) is 'neither' as well:
those keys and values come from weights that this replica knows nothing of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from updater.core.policy import CachePolicy, InFlight
from updater.server.security import ConfigurationError

Cells = tuple[tuple[InFlight, CachePolicy], ...]

#: Names connectors (their classes, separated by commas) that are taken although they are neither.
ALLOW = "LIVEWEIGHTS_ALLOW_KV_CONNECTOR"
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
MULTI = f"{_V1}.multi_connector.MultiConnector"


@dataclass(frozen=True, slots=True)
class Tier:
    """`resets`: it is empty after vLLM's reset. `salted`: its keys carry the salt of a request, and with it the
    version (`hosted.gate.Namespaces`).
    """

    resets: bool = False
    salted: bool = False

    @property
    def is_neither(self) -> bool:
        return not (self.resets or self.salted)


NEITHER = Tier()
#: Class -> what it does in vLLM 0.32, read in its source. A class that is not here is neither.
CONNECTORS: Mapping[str, Tier] = {
    # keyed by vLLM's block hashes, and with a reset of their own
    f"{_V1}.offloading_connector.OffloadingConnector": Tier(resets=True, salted=True),
    f"{_V1}.simple_cpu_offload_connector.SimpleCPUOffloadConnector": Tier(resets=True, salted=True),
    f"{_V1}.mooncake.store.connector.MooncakeStoreConnector": Tier(resets=True, salted=True),
    # hands the salt to its server with every look-up and every store
    f"{_V1}.lmcache_mp_connector.LMCacheMPConnectorUpstream": Tier(salted=True),
    # keyed by tokens alone
    f"{_V1}.example_connector.ExampleConnector": NEITHER,
    f"{_V1}.hf3fs.hf3fs_connector.HF3FSKVConnector": NEITHER,
    # keyed inside another package
    f"{_V1}.lmcache_connector.LMCacheConnectorV1": NEITHER,
    f"{_V1}.flexkv_connector.FlexKVConnectorV1": NEITHER,
    # bring what another engine computed
    f"{_V1}.nixl.connector.NixlPullConnector": NEITHER,
    f"{_V1}.nixl.connector.NixlPushConnector": NEITHER,
    f"{_V1}.mooncake.mooncake_connector.MooncakeConnector": NEITHER,
    f"{_V1}.moriio.moriio_connector.MoRIIOConnector": NEITHER,
    # keep what is no cache of prompts: never looked into further
    f"{_V1}.hisparse.connector.HiSparseConnector": NEITHER,
    f"{_V1}.example_hidden_states_connector.ExampleHiddenStatesConnector": NEITHER,
    f"{_V1}.decode_bench_connector.DecodeBenchConnector": NEITHER,
}


@dataclass(frozen=True, slots=True)
class Connectors:
    """`tiers`: class -> what it does, of every connector of one server. `allowed`: classes, with or without their
    module, that were taken by name.
    """

    tiers: Mapping[str, Tier]
    allowed: frozenset[str] = frozenset()

    @property
    def refused(self) -> tuple[str, ...]:
        return tuple(name for name, tier in self.tiers.items() if tier.is_neither and not self._is_allowed(name))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What every receipt says of those that were allowed."""
        taken = [name for name, tier in self.tiers.items() if tier.is_neither and self._is_allowed(name)]
        return tuple(
            f"{ALLOW}: {_class(name)} neither empties itself nor tells versions apart: replies may build on keys and"
            " values of other weights"
            for name in taken
        )

    def check(self) -> None:
        """Raises ConfigurationError with every connector that is neither."""
        if self.refused:
            names = ", ".join(self.refused)
            raise ConfigurationError(
                f"liveweights cannot serve here: {names}: after an update it would answer with keys and values of the"
                f" weights before; leave it out, or set {ALLOW}={','.join(map(_class, self.refused))}"
            )

    def cells(self, cells: Cells) -> Cells:
        """Those of `cells` that are right with these tiers beside vLLM's own cache.

        A tier that tells versions apart and is never empty goes with `reset`, as every request is salted. Cells that
        leave blocks of one version under the salt of another are left out: this server knows that it must not enter
        that namespace again, but others may read the tier, or this one after a restart.
        """
        counted = [tier for tier in self.tiers.values() if not tier.is_neither]
        if not counted:
            return cells
        caches = {CachePolicy.RESET}
        if all(tier.salted for tier in counted):
            caches.add(CachePolicy.NAMESPACE)
        return tuple(cell for cell in cells if cell[0] in (InFlight.DRAIN, InFlight.ABORT) and cell[1] in caches)

    def notes(self, cells: Cells) -> tuple[str, ...]:
        """Why some of `cells` are left out."""
        left = [cell for cell in cells if cell not in self.cells(cells)]
        told = ", ".join(f"{in_flight.value} with {cache.value}" for in_flight, cache in left)
        return (f"{told}: not with {', '.join(map(_class, self.tiers))} (docs/vllm.md)",) if left else ()

    def _is_allowed(self, name: str) -> bool:
        return bool({name, _class(name)} & self.allowed)


def connectors(vllm_config: Any, allowed: Collection[str] = ()) -> Connectors:
    """Of a server, the parts of a multi connector each by itself. What keeps outputs of encoders is neither: its keys
    name an input alone.
    """
    names = dict.fromkeys(_classes(getattr(vllm_config, "kv_transfer_config", None)))
    tiers = {name: CONNECTORS.get(name, NEITHER) for name in names}
    encoders = getattr(vllm_config, "ec_transfer_config", None)
    if encoders is not None and encoders.ec_connector:
        tiers[encoders.ec_connector] = NEITHER
    return Connectors(tiers, frozenset(allowed))


def named(text: str) -> tuple[str, ...]:
    """The classes in a list separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _classes(config: Any) -> Iterator[str]:
    if config is None or not config.kv_connector:
        return
    name = _resolved(config)
    if name != MULTI:
        yield name
        return
    for part in (config.kv_connector_extra_config or {}).get("connectors") or ():
        fields: dict[str, Any] = {
            "kv_connector": None,
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {},
        }
        yield from _classes(SimpleNamespace(**{**fields, **part}))


def _resolved(config: Any) -> str:
    """`package.module.Name` of the class that vLLM takes; the name alone where that cannot be found out here."""
    factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    try:
        kind = factory.KVConnectorFactory.get_connector_class(config)
    except (ImportError, AttributeError, ValueError):
        return str(config.kv_connector)
    return f"{kind.__module__}.{kind.__qualname__}"


def _class(name: str) -> str:
    return name.rpartition(".")[2]
