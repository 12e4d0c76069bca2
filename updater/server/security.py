"""Who may call what. One rule: loopback without a configured token is open; with a token every path but the two
health paths needs it; a public bind without a token refuses to start.

The coordinator sends its own token nowhere: it speaks to each front with a key made of the token, the replica's id and
the address that this replica announced. Both sides compute it, so a coordinator whose journal is lost still has it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from updater.core.errors import Failure, Unauthorized

ADMIN_ENV = "LIVEWEIGHTS_ADMIN_TOKEN"
INFERENCE_ENV = "LIVEWEIGHTS_INFERENCE_TOKEN"
#: As ASGI has them.
Headers = Iterable[tuple[bytes, bytes]]
_FOREIGN_HINT = f"call it as 127.0.0.1 or localhost, or set {ADMIN_ENV} and show that token"
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
MIN_TOKEN = 8


class ConfigurationError(ValueError):
    """The settings contradict the rule: nothing starts."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Bearer tokens of the two scopes, empty where not configured. Never shown: they have no `repr`.

    `admin`: the one that is spoken with; `admin_also` and `inference_also` are accepted too, while a token is rotated.
    """

    admin: str = field(default="", repr=False)
    inference: str = field(default="", repr=False)
    admin_also: tuple[str, ...] = field(default=(), repr=False)
    inference_also: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for token in (*self.admins, *self.inferences):
            if token and (len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
                raise ConfigurationError(f"a token needs at least {MIN_TOKEN} printable ASCII characters, no spaces")
        if set(self.admins) & set(self.inferences) - {""}:
            raise ConfigurationError("the two scopes need different tokens")

    @property
    def admins(self) -> tuple[str, ...]:
        """All that open everything; the first may be empty."""
        return (self.admin, *self.admin_also)

    @property
    def inferences(self) -> tuple[str, ...]:
        return (self.inference, *self.inference_also)

    @property
    def configured(self) -> bool:
        return bool(self.admin or self.inference)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Tokens:
        """From the environment; `NAME_FILE` names a file that holds the token and only its owner may read.

        Several, with commas between them, are all accepted, and the first is spoken with.
        """
        source = os.environ if env is None else env
        admin, *admin_also = _listed(_token(source, ADMIN_ENV))
        inference, *inference_also = _listed(_token(source, INFERENCE_ENV))
        return cls(admin, inference, tuple(admin_also), tuple(inference_also))


def _listed(text: str) -> list[str]:
    """The tokens of one variable, at least one, which may be empty."""
    return [each.strip() for each in text.split(",") if each.strip()] or [""]


def _token(env: Mapping[str, str], name: str) -> str:
    if name in env:
        if not env[name]:
            raise ConfigurationError(f"{name} is set but empty")
        return env[name]
    path = env.get(f"{name}_FILE")
    if path is None:
        return ""
    try:
        if Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigurationError(f"{name}_FILE can be read by others: chmod 600 it")
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name}_FILE cannot be read: {type(error).__name__}") from None
    if not token:
        raise ConfigurationError(f"{name}_FILE is empty")
    return token


def front_key(token: str, replica: str, url: str) -> str:
    """What the coordinator shows to the front of `replica` at the announced `url`; empty where no token is configured.

    HMAC-SHA256 with the admin token as key. Worthless at every other address: a process that joins under a URL of its
    own learns nothing that another front would take.
    """
    if not token:
        return ""
    said = "\0".join(("liveweights front key 1", replica, announced(url)))
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def announced(url: str) -> str:
    """One spelling of a front's address: scheme and host in small letters, no port that the scheme implies, no slash
    at the end. What is no URL stays as it is."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return url
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        return url
    host = f"[{host}]" if ":" in host else host
    implied = port is None or port == (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{host}{'' if implied else f':{port}'}{parts.path.rstrip('/')}"


@dataclass(frozen=True, slots=True)
class FrontKeys:
    """What opens the participant contract of one front, beside the admin token: one key for each token it accepts.

    `prefix`: of the paths that a key opens, and no others.
    """

    prefix: str = "/participant/v1/"
    keys: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, tokens: Tokens, replica: str, url: str, prefix: str = "/participant/v1/") -> FrontKeys:
        """`url`: the address that the front announces."""
        return cls(prefix, tuple(front_key(token, replica, url) for token in tokens.admins if token))

    def open(self, path: str, given: bytes) -> bool:
        """Every key is compared before anything is decided."""
        same = [_same(given, key) for key in self.keys]
        return any(same) and path.startswith(self.prefix)


def is_loopback(host: str) -> bool:
    """Whether a bind address is reachable from this machine only. A name other than `localhost` is not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, tokens: Tokens) -> None:
    """Raises ConfigurationError for a public bind without an admin token (B153)."""
    if not is_loopback(host) and not tokens.admin:
        raise ConfigurationError(f"{host} can be reached from other machines: set {ADMIN_ENV} or bind 127.0.0.1")


@dataclass(frozen=True, slots=True)
class Access:
    """The rule, applied to one request. Paths are compared whole: whatever is not listed is closed (B156).

    `headers`: all of a request, names in small letters.
    """

    tokens: Tokens
    inference_paths: frozenset[str]
    keys: FrontKeys = field(default_factory=FrontKeys)

    def refuses(self, path: str, headers: Headers) -> Unauthorized | None:
        """None: go on."""
        if path in OPEN_PATHS:
            return None
        if not self.tokens.configured:
            return _foreign(headers)
        given = _bearer(headers)
        # Every configured token is compared, in constant time, before anything is decided.
        admin = _any(given, self.tokens.admins)
        inference = _any(given, self.tokens.inferences)
        key = self.keys.open(path, given)
        if admin or key or (inference and path in self.inference_paths):
            return None
        if inference:
            return Unauthorized(Failure("forbidden", "this token opens inference routes only"))
        return Unauthorized(Failure("unauthorized", "a bearer token is needed"))

    def of_fleet(self, path: str, headers: Headers) -> bool:
        """Whether the caller has shown what only the fleet and its operators have; never where no token is set."""
        given = _bearer(headers)
        return self.tokens.configured and (_any(given, self.tokens.admins) or self.keys.open(path, given))

    def tells_all(self, path: str, headers: Headers) -> bool:
        """Whether the texts of errors are for this caller: they name addresses, files and machines. Others are told
        the code alone, so that a port cannot be asked about through us."""
        if not self.tokens.configured:
            return _foreign(headers) is None
        return self.of_fleet(path, headers)


def _values(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


def _bearer(headers: Headers) -> bytes:
    values = _values(headers, b"authorization")
    if len(values) != 1:
        return b""
    scheme, _, token = values[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _foreign(headers: Headers) -> Unauthorized | None:
    """Where no token is configured only this machine can call, and a browser on it calls for any page. Such a call has
    the page's `Origin`, or a `Host` that was made to lead here (DNS rebinding). Without a token the server is bound to
    loopback, so no other machine has a reason to use another name."""
    hosts = [b"//" + value for value in _values(headers, b"host")]
    for value in (*hosts, *_values(headers, b"origin")):
        if not is_loopback(_host(value)):
            name = value.decode("latin-1").removeprefix("//")[:100]
            return Unauthorized(Failure("forbidden", f"{name!r} is no name of this machine", hint=_FOREIGN_HINT))
    return None


def _host(url: bytes) -> str:
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _any(given: bytes, tokens: tuple[str, ...]) -> bool:
    """Every one is compared before anything is decided."""
    found = [_same(given, token) for token in tokens]
    return any(found)


def _same(given: bytes, token: str) -> bool:
    return hmac.compare_digest(given, token.encode()) and bool(token)
