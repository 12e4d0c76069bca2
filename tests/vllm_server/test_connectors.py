"""The table of KV connectors against vLLM's own registry and classes."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.vllm.connectors import CONNECTORS, MULTI, NEITHER, connectors

pytestmark = [pytest.mark.vllm, pytest.mark.case("F07")]

KV = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING = f"{KV}.offloading_connector.OffloadingConnector"
EXAMPLE = f"{KV}.example_connector.ExampleConnector"
#: Registered under one name and defined under another; not to be imported without packages that are not here.
ELSEWHERE = {f"{KV}.lmcache_mp_connector.LMCacheMPConnector": f"{KV}.lmcache_mp_connector.LMCacheMPConnectorUpstream"}


def registered() -> dict[str, str]:
    """Name -> class, of every connector that this vLLM knows."""
    factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    found = {}
    for name, loader in factory.KVConnectorFactory._registry.items():
        held = inspect.getclosurevars(loader).nonlocals
        kind = f"{held['module_path']}.{held['class_name']}"
        try:
            loaded = loader()
            kind = f"{loaded.__module__}.{loaded.__qualname__}"
        except ImportError:
            kind = ELSEWHERE.get(kind, kind)
        found[name] = kind
    return found


def has_reset(kind: str) -> bool:
    """Whether the class itself, not its base, says what a reset does."""
    module, _, name = kind.rpartition(".")
    package, _, last = module.rpartition(".")
    origin = Path(str(find_spec(package).origin)).with_name(f"{last}.py")  # type: ignore[union-attr]
    (body,) = [
        node for node in ast.parse(origin.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return any(isinstance(node, ast.FunctionDef) and node.name == "reset_cache" for node in body.body)


def test_every_registered_connector_is_in_the_table_and_no_other() -> None:
    assert set(registered().values()) == {*CONNECTORS, MULTI}


@pytest.mark.parametrize("kind", sorted(CONNECTORS))
def test_those_with_a_reset_of_their_own_are_the_ones_that_the_table_says(kind: str) -> None:
    assert has_reset(kind) is CONNECTORS[kind].resets


def config(name: str | None, **more: Any) -> Any:
    """Of a server with that connector."""
    configs: Any = import_module("vllm.config")
    fields = {"kv_role": "kv_both", **more} if name else more
    return SimpleNamespace(kv_transfer_config=configs.KVTransferConfig(kv_connector=name, **fields))


def multi(*names: str) -> dict[str, Any]:
    return {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in names]}


def test_a_server_s_connectors_are_found_by_their_classes() -> None:
    both = CONNECTORS[OFFLOADING]
    assert connectors(SimpleNamespace(kv_transfer_config=None)).tiers == {}
    assert connectors(config(None)).tiers == {}
    assert connectors(config("OffloadingConnector")).tiers == {OFFLOADING: both}
    assert connectors(config("ExampleConnector")).refused == (EXAMPLE,)
    parts = multi("OffloadingConnector", "ExampleConnector")
    found = connectors(config("MultiConnector", kv_connector_extra_config=parts))
    assert (found.tiers, found.refused) == ({OFFLOADING: both, EXAMPLE: NEITHER}, (EXAMPLE,))
    nested = {"connectors": [{"kv_connector": "MultiConnector", "kv_connector_extra_config": parts}]}
    assert connectors(config("MultiConnector", kv_connector_extra_config=nested)).refused == (EXAMPLE,)


@pytest.mark.parametrize("module", [__name__, "no.such.module", None])
def test_a_class_that_the_table_does_not_know_is_neither(module: str | None) -> None:
    name = "OffloadingConnector" if module else "NoSuchConnector"
    found = connectors(config(name, kv_connector_module_path=module))
    assert list(found.tiers.values()) == [NEITHER]
    assert found.refused


def test_a_store_of_encoder_outputs_is_neither() -> None:
    found = connectors(SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_connector="ECExampleConnector")))
    assert found.refused == ("ECExampleConnector",)


class OffloadingConnector:
    """Of another package, under a name of vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        pass
