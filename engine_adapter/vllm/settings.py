"""What a vLLM server is told about its fleet: by environment variables, since `vllm serve` reads the command line."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from engine_adapter.replica.admission import Limits
from engine_adapter.vllm.connectors import ALLOW, named
from updater.server.security import ConfigurationError, Tokens, is_loopback

COORDINATOR = "LIVEWEIGHTS_COORDINATOR"
REPLICA = "LIVEWEIGHTS_REPLICA"
ROOTS = "LIVEWEIGHTS_ROOTS"
URL = "LIVEWEIGHTS_URL"
WAIT_S = "LIVEWEIGHTS_WAIT_S"
QUEUE = "LIVEWEIGHTS_QUEUE"
MODE = "LIVEWEIGHTS_VLLM_MODE"
RELOAD_S = "LIVEWEIGHTS_RELOAD_S"
SPARE = "LIVEWEIGHTS_SPARE"
#: Where the participant contract lies: not below `/v1`, which vLLM's API keys guard. It has a guard of its own.
PREFIX = "/liveweights/v1"
_RELOAD_S = 600.0  # as long as a start may take
_QUEUE = 8192  # rollouts come by the thousand, and one request may have hundreds of prompts
_Choice = TypeVar("_Choice", bound=StrEnum)


class Mode(StrEnum):
    """How weights get into the workers."""

    STAGED = "staged"  # by our ranks inside them: verified, with a way back
    RELOAD = "reload"  # by vLLM's own reload: neither; needs no worker extension


class SparePlace(StrEnum):
    """Where the second copy of a rank's weights lies."""

    DEVICE = "device"  # beside the first
    HOST = "host"  # in pinned host memory: installs are exchanges over the bus


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """`coordinator` empty: the replica opens by itself. `roots`: folders that sources may lie under. `reload_s`: how
    long one reload of vLLM may take. `allow_kv_connector`: classes, see `connectors`.
    """

    coordinator: str = ""
    replica: str = ""
    url: str = ""
    roots: tuple[str, ...] = ()
    tokens: Tokens = field(default_factory=Tokens)
    limits: Limits = field(default_factory=Limits)
    mode: Mode = Mode.STAGED
    reload_s: float = _RELOAD_S
    spare: SparePlace = SparePlace.DEVICE
    allow_kv_connector: tuple[str, ...] = ()
    start_s: float = 600.0
    stop_s: float = 10.0


def read(args: Namespace, env: Mapping[str, str] | None = None) -> VllmSettings:
    """`args`: of `vllm serve`. Raises ConfigurationError."""
    env = os.environ if env is None else env
    host, port = args.host or "", int(args.port)
    tokens = Tokens.from_env(env)
    if not is_loopback(host or "0.0.0.0") and not tokens.admin:
        raise ConfigurationError(
            f"{host or 'every interface'} can be reached from outside: set LIVEWEIGHTS_ADMIN_TOKEN, or serve with"
            " --host 127.0.0.1"
        )
    reached = host if host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    url = env.get(URL) or f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
    return VllmSettings(
        coordinator=env.get(COORDINATOR, ""),
        replica=env.get(REPLICA) or f"{reached}-{port}",
        url=url.rstrip("/") + PREFIX,
        roots=tuple(root for root in env.get(ROOTS, "").split(os.pathsep) if root),
        tokens=tokens,
        limits=Limits(_count(env, QUEUE, _QUEUE), _seconds(env, WAIT_S, Limits().wait_s)),
        mode=_choice(Mode, MODE, env.get(MODE) or Mode.STAGED),
        reload_s=_seconds(env, RELOAD_S, _RELOAD_S),
        spare=_choice(SparePlace, SPARE, env.get(SPARE) or SparePlace.DEVICE),
        allow_kv_connector=named(env.get(ALLOW, "")),
    )


def _choice(kind: type[_Choice], name: str, text: str) -> _Choice:
    try:
        return kind(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is none of {', '.join(kind)}") from None


def _count(env: Mapping[str, str], name: str, otherwise: int) -> int:
    text = env.get(name) or str(otherwise)
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{name}={text!r} is no number of requests")
    return int(text)


def _seconds(env: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        found = float(env.get(name) or otherwise)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ConfigurationError(f"{name}={env[name]!r} is no number of seconds")
    return found
