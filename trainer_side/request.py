"""What a push asks for beside the bytes, checked before one of them moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer_side import flows
from trainer_side.flows import Flow
from updater import wire
from updater.core.errors import refuse
from updater.core.policy import Policy
from updater.core.version import Version


@dataclass(frozen=True, slots=True)
class Terms:
    """`version`: a step of the current run, or `run-step`. `policy`: what differs from the defaults, as JSON.

    `base_version`: refuse unless this one is live. `dtypes`: fingerprint of what the fleet said that it holds.
    """

    version: int | str
    policy: Mapping[str, Any]
    id: str | None = None
    base_version: str | None = None
    dtypes: str | None = None

    @classmethod
    def of(
        cls,
        version: int | str | Version,
        policy: Policy | Mapping[str, Any] | None = None,
        id: str | None = None,
        base_version: str | Version | None = None,
    ) -> Terms:
        """Raises Rejected `bad_request`."""
        if isinstance(version, str):
            version = int(version) if version.isascii() and version.isdecimal() else _parsed(version)
        base = None if base_version is None else str(base_version)
        return cls(str(version) if isinstance(version, Version) else version, _policy(policy), id, base)

    def allowing(
        self, suspicious: Sequence[str], layouts: Mapping[str, str] | None, config: Sequence[str] = ()
    ) -> Terms:
        """The same with more in the policy. What is named here comes before what the policy says."""
        more: dict[str, Any] = {}
        for name, allowed in (("allow_suspicious", suspicious), ("allow_config", config)):
            if allowed:
                more[name] = list(dict.fromkeys((*self.policy.get(name, ()), *allowed)))
        if layouts:
            given = {glob: str(kind) for glob, kind in layouts.items()}
            more["layouts"] = {**given, **{k: v for k, v in self.policy.get("layouts", {}).items() if k not in given}}
        return replace(self, policy={**self.policy, **more}) if more else self

    def body(self) -> dict[str, Any]:
        """Of the request, without its source."""
        body: dict[str, Any] = {"version": self.version}
        if self.policy:
            body["policy"] = dict(self.policy)
        if self.id is not None:
            body["id"] = self.id
        if self.base_version is not None:
            body["base_version"] = self.base_version
        if self.dtypes is not None:
            body["dtypes"] = self.dtypes
        return body

    def label(self) -> Flow[str]:
        """A bare step belongs to the run that is live, or with `new_run` to the next one."""
        if not isinstance(self.version, int):
            return str(self.version)
        answer = yield from flows.get("/v1/version")
        live = _parsed(str(answer.get("version") or "start"))
        return str(Version(live.run + 1 if self.policy.get("new_run") else live.run, self.version))


def _policy(policy: Policy | Mapping[str, Any] | None) -> dict[str, Any]:
    if policy is None:
        return {}
    if isinstance(policy, Policy):
        plain, usual = wire.plain(policy), wire.plain(Policy())
        found = {key: value for key, value in plain.items() if value != usual[key]}
        return {**found, "layouts": dict(found["layouts"])} if "layouts" in found else found
    return dict(policy)


def _parsed(text: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as error:
        raise refuse("bad_request", str(error)) from None
