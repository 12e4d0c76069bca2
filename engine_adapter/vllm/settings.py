"""What a vLLM server is told about its fleet: by environment variables, since `vllm serve` reads the command line."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_adapter.replica.door import Limits
from updater.security import ConfigurationError, Tokens, is_loopback

COORDINATOR = "LIVEWEIGHTS_COORDINATOR"
REPLICA = "LIVEWEIGHTS_REPLICA"
ROOTS = "LIVEWEIGHTS_ROOTS"
URL = "LIVEWEIGHTS_URL"
WAIT_S = "LIVEWEIGHTS_WAIT_S"
#: Where the participant contract lies: below a prefix that vLLM's own API key guards.
PREFIX = "/v1/liveweights"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """`coordinator` empty: the replica opens by itself. `roots`: folders that sources may lie under."""

    coordinator: str = ""
    replica: str = ""
    url: str = ""
    roots: tuple[str, ...] = ()
    tokens: Tokens = field(default_factory=Tokens)
    limits: Limits = field(default_factory=Limits)
    start_s: float = 600.0
    stop_s: float = 10.0


def read(args: Namespace, env: Mapping[str, str] | None = None) -> VllmSettings:
    """`args`: of `vllm serve`. Raises ConfigurationError."""
    env = os.environ if env is None else env
    host, port = args.host or "", int(args.port)
    tokens = Tokens.from_env(env)
    if not is_loopback(host or "0.0.0.0") and not tokens.admin:
        raise ConfigurationError(
            f"{host or 'every interface'} can be reached from outside: set LIVEWEIGHTS_ADMIN_TOKEN, and pass the same"
            " token to vLLM as one of --api-key, or serve with --host 127.0.0.1"
        )
    reached = host if host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    url = env.get(URL) or f"http://{reached}:{port}"
    return VllmSettings(
        coordinator=env.get(COORDINATOR, ""),
        replica=env.get(REPLICA) or f"{reached}-{port}",
        url=url.rstrip("/") + PREFIX,
        roots=tuple(root for root in env.get(ROOTS, "").split(os.pathsep) if root),
        tokens=tokens,
        limits=Limits(wait_s=float(env.get(WAIT_S, Limits().wait_s))),
    )
