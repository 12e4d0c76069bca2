"""What a push asks for beside the bytes, checked before one of them moves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack, cast

from trainer_side.client.handle import Hooks
from trainer_side.client.protocol import UPDATE_S, HttpSteps, version
from updater.core.errors import refuse
from updater.core.policy import Policy
from updater.core.version import Version
from updater.protocol import wire

F = TypeVar("F", bound=Callable[..., Any])
Options = TypeVar("Options", bound=Mapping[str, Any])
Progress = Callable[[int], None]


def silent(_bytes: int) -> None: ...


class RequestOptions(TypedDict, total=False):
    """One push, beside its weights and its version.

    `policy`: what differs from the defaults.
    `allow_suspicious`: patterns of tensors that may hold no normal number; `layouts`: {pattern: kind} of tensors that
    hold several of the model's (`updater.core.policy.SourceLayout`); `allow_config`: keys of config, tokenizer and
    quantisation in which the source may differ from the engine; all three are part of the policy.
    `base_version`: refuse unless this one is live. `id`: names this update; asked again it is the same one.
    `hooks`: called as it goes on. `lease_s`: how long a stream lives without a sign of this process (renewed in the
    background). `timeout_s`: how long to wait for the end. `progress`: called with bytes that were written or sent.
    """

    policy: Policy | Mapping[str, Any] | None
    allow_suspicious: Sequence[str]
    layouts: Mapping[str, str] | None
    allow_config: Sequence[str]
    hooks: Hooks | None
    id: str | None
    base_version: str | Version | None
    lease_s: float | None
    timeout_s: float
    progress: Progress


REQUEST_DEFAULTS: RequestOptions = {
    "policy": None,
    "allow_suspicious": (),
    "layouts": None,
    "allow_config": (),
    "hooks": None,
    "id": None,
    "base_version": None,
    "lease_s": None,
    "timeout_s": UPDATE_S,
    "progress": silent,
}


@dataclass(frozen=True, slots=True)
class PushRequest:
    """One push as the coordinator is asked for it. `version`: a step of the current run, or `run-step`. `policy`: as
    JSON. `dtypes`: fingerprint of what the fleet said that it holds. The others: as in `RequestOptions`.
    """

    version: int | str
    policy: Mapping[str, Any]
    id: str | None
    base_version: str | None
    hooks: Hooks
    lease_s: float | None
    timeout_s: float
    progress: Progress
    dtypes: str | None = None

    @classmethod
    def of(cls, version: int | str | Version, **options: Unpack[RequestOptions]) -> PushRequest:
        """Raises Rejected `bad_request` for a version that is none, TypeError for an option that is none."""
        asked = complete(options, REQUEST_DEFAULTS)
        if isinstance(version, str):
            version = int(version) if version.isascii() and version.isdecimal() else _parsed(version)
        base = asked["base_version"]
        return cls(
            version=str(version) if isinstance(version, Version) else version,
            policy=_policy(asked),
            id=asked["id"],
            base_version=None if base is None else str(base),
            hooks=asked["hooks"] or Hooks(),
            lease_s=asked["lease_s"],
            timeout_s=asked["timeout_s"],
            progress=asked["progress"],
        )

    def body(self) -> dict[str, Any]:
        """Of the HTTP request, without its source."""
        given = {"id": self.id, "base_version": self.base_version, "dtypes": self.dtypes}
        body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return {"version": self.version, **({"policy": dict(self.policy)} if self.policy else {}), **body}

    def label(self) -> HttpSteps[str]:
        """A bare step belongs to the run that is live, or with `new_run` to the next one."""
        if not isinstance(self.version, int):
            return str(self.version)
        live = _parsed((yield from version()).version or "start")
        return str(Version(live.run + 1 if self.policy.get("new_run") else live.run, self.version))


def complete(options: Options, defaults: Options) -> Options:
    """`options` with the defaults of what is left out. Raises TypeError for a name without a default."""
    unknown = sorted(options.keys() - defaults.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument: {', '.join(unknown)}")
    return cast(Options, {**defaults, **options})


def keywords(kind: Any, defaults: Mapping[str, Any]) -> Callable[[F], F]:
    """Shows `**options: Unpack[kind]` of a function as single keywords, for `help` and for editors at run time."""

    def shown(function: F) -> F:
        told = inspect.signature(function)
        named = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint.__forward_arg__
            )
            for name, hint in kind.__annotations__.items()
        ]
        first = [each for each in told.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        cast(Any, function).__signature__ = told.replace(parameters=[*first, *named])
        return function

    return shown


def _policy(asked: RequestOptions) -> dict[str, Any]:
    """What differs from the defaults, as JSON. What is named beside the policy comes before what the policy says."""
    found = _plain(asked["policy"])
    for name, allowed in (
        ("allow_suspicious", asked["allow_suspicious"]),
        ("allow_config", asked["allow_config"]),
    ):
        if allowed:
            found[name] = list(dict.fromkeys((*found.get(name, ()), *allowed)))
    layouts = asked["layouts"]
    if layouts:
        given = {glob: str(kind) for glob, kind in layouts.items()}
        found["layouts"] = {**given, **{k: v for k, v in found.get("layouts", {}).items() if k not in given}}
    return found


def _plain(policy: Policy | Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(policy, Policy):
        return dict(policy or {})
    plain, usual = wire.plain(policy), wire.plain(Policy())
    found = {key: value for key, value in plain.items() if value != usual[key]}
    return {**found, "layouts": dict(found["layouts"])} if "layouts" in found else found


def _parsed(text: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as error:
        raise refuse("bad_request", str(error)) from None
