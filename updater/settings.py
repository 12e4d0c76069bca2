"""What a coordinator is told at start. Every field has a default that works on one machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from updater.core.policy import Policy, SourceLayout
from updater.server.networks import Networks
from updater.server.security import ConfigurationError, Tokens, check_bind

DEFAULT_PORT = 8700


STATE_ENV = "LIVEWEIGHTS_STATE"
#: Where 0.1.0 kept its journal by default, relative to where it was started.
OLD_STATE = Path(".state/liveweights")


def default_state(fleet: str = "default") -> Path:
    """`$LIVEWEIGHTS_STATE`, else a folder of this user for this fleet, wherever the command was started."""
    given = os.environ.get(STATE_ENV)
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_STATE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return home / "liveweights" / quote(fleet, safe="")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. The policy of an update bounds PLANNING to READY and one pause; these bound the rest."""

    plan_s: float = 60.0
    install_s: float = 30.0
    invalidate_s: float = 30.0
    restore_s: float = 30.0
    resume_s: float = 30.0
    discard_s: float = 30.0
    status_s: float = 2.0
    join_s: float = 30.0
    probe_every_s: float = 2.0
    watch_s: float = 3.0  # how often a front asks whether it is still a member
    lost_after: int = 3  # probes in a row without an answer
    shutdown_s: float = 20.0
    update_lease_s: float = 60.0
    retry_first_s: float = 0.05
    retry_most_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """`state`: folder of the journal; None: `default_state`. `roots`: folders under which a source must lie, links
    resolved. `port` 0: any free one.

    `allow_suspicious`, `layouts`: as in the policy of an update, for all updates of this fleet; an update's own come
    first. `allow_networks`: CIDR networks that a replica may join from; empty: this machine if bound to loopback, else
    any.
    """

    state: Path | None = None
    fleet: str = "default"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    roots: tuple[Path, ...] = ()
    tokens: Tokens = field(default_factory=Tokens)
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_body: int = 4 << 20
    max_manifest: int = 64 << 20
    new_fleet: bool = False  # on an empty journal: do not wait for replicas of an older fleet to call
    history: int = 1000  # requests whose receipts are kept whole; older ones leave a short one for a long time

    allow_suspicious: tuple[str, ...] = ()
    layouts: tuple[tuple[str, SourceLayout], ...] = ()
    allow_networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_bind(self.host, self.tokens)
        _ = self.networks  # raises for what is no network
        if self.fleet in ("", ".", ".."):
            raise ConfigurationError("fleet: a name is needed")
        if self.history < 1:
            raise ConfigurationError("history: at least one request has to be kept")

    def extended(self, policy: Policy) -> Policy:
        """An update's policy with what holds for the whole fleet."""
        suspicious = tuple(dict.fromkeys((*policy.allow_suspicious, *self.allow_suspicious)))
        layouts = tuple(dict.fromkeys((*policy.layouts, *self.layouts)))
        return replace(policy, allow_suspicious=suspicious, layouts=layouts)

    @property
    def networks(self) -> Networks:
        """Where the address of a replica must lie."""
        return Networks.of(self.host, self.allow_networks)

    @property
    def state_given(self) -> bool:
        """Whether somebody chose the folder."""
        return self.state is not None or bool(os.environ.get(STATE_ENV))

    @property
    def state_folder(self) -> Path:
        """Of the journal and the manifests."""
        return self.state if self.state is not None else default_state(self.fleet)

    @property
    def allowed_roots(self) -> tuple[Path, ...]:
        """The configured roots, else the state folder's `checkpoints`. Resolved."""
        return tuple(root.resolve() for root in (self.roots or (self.state_folder / "checkpoints",)))
