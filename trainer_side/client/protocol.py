"""What a client asks a coordinator and how it reads the answers, without IO: one description for both clients.

A conversation is a generator (`HttpSteps`): it yields a `HttpCall` and is sent an `HttpAnswer` or a `NoAnswer`;
it yields a `Wait` and is sent None; it returns its result or raises a typed error. The first functions here are the
methods of `Client` and `AsyncClient`, with the same arguments.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from trainer_side.client.causes import bodies
from updater.core.errors import Failure, Unavailable, refuse
from updater.core.version import Version
from updater.protocol.answers import FleetState, ModelState, Receipt, UpdateState, VersionState
from updater.protocol.manifest import Manifest
from updater.protocol.problems import error_of

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

#: Waits between two tries of a call that got no answer, in seconds. Every call of ours may be repeated.
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0)
CALL_S = 30.0
#: How long an update may take before a waiting client gives up; the update goes on.
UPDATE_S = 1800.0
UNREACHABLE_HINT = "is `liveweights serve` running, and is this its address (--url, LIVEWEIGHTS_URL)?"
#: The same for an address where something else answers.
ADDRESS_HINT = "give the coordinator's address (--url, LIVEWEIGHTS_URL, or the argument url)"
#: What a proxy answers for a server that it cannot reach.
_NO_SERVER = (502, 504)
#: Characters of a manifest that may travel within a request; larger ones are uploaded first.
INLINE_MANIFEST = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request. `body` is sent as JSON, `text` as it is. `timeout_s` bounds the whole of it. `tries`: whether it is
    sent again when no answer came."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: tuple[tuple[str, str], ...] = ()
    timeout_s: float = CALL_S
    text: str | None = None
    tries: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """`server`: the address that it came from."""

    status: int
    body: bytes
    server: str = ""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The connection was refused, broke, or took too long: the call may or may not have been handled.

    `again`: whether another try makes sense (not after a time-out: the time that the caller gave is over).
    """

    reason: str
    again: bool = True


HttpSteps = Generator[HttpCall | Wait, HttpAnswer | NoAnswer | None, T]


# -- the verbs of both clients


def update(body: Mapping[str, Any], *, timeout_s: float = UPDATE_S) -> HttpSteps[Receipt]:
    """Begin an update (the body of `POST /v1/updates`) and wait for the receipt of a committed one."""
    return (yield from ask(Receipt, _begin(body, timeout_s)))


def begin(body: Mapping[str, Any]) -> HttpSteps[UpdateState]:
    """Begin an update and return while it runs."""
    return (yield from ask(UpdateState, _begin(body)))


def rollback(
    target: Version | str | None = None,
    expected_live: Version | str | None = None,
    *,
    timeout_s: float = UPDATE_S,
    **more: Any,
) -> HttpSteps[Receipt]:
    """Back to `target` (default: what the fleet offers as `rollback_to`) from `expected_live` (default: live).

    `more`: of the body, as `policy={"in_flight": "abort"}` for a fleet that does not come to rest in time.
    """
    if target is None or expected_live is None:
        live = yield from version()
        target = live.rollback_to if target is None else target
        expected_live = live.version if expected_live is None else expected_live
    body = {"id": fresh_id("rollback"), "target": str(target or ""), "expected_live": str(expected_live or ""), **more}
    return (yield from ask(Receipt, _post("/v1/rollback", body, timeout_s)))


def version() -> HttpSteps[VersionState]:
    """What is live, since when, and what a rollback would bring back."""
    return (yield from ask(VersionState, HttpCall("GET", "/v1/version")))


def fleet() -> HttpSteps[FleetState]:
    """Members and ranks."""
    return (yield from ask(FleetState, HttpCall("GET", "/v1/fleet")))


def adopt(members: Mapping[str, str]) -> HttpSteps[FleetState]:
    """Let this coordinator, whose journal is empty or behind, take over these fronts (replica to URL)."""
    named = [{"replica": replica, "url": url} for replica, url in members.items()]
    call = HttpCall("POST", "/v1/fleet/adopt", {"members": named, "confirm": True}, tries=False)
    return (yield from ask(FleetState, call))


def model() -> HttpSteps[ModelState]:
    """What the fleet's engines run on, beside tensors: config, tokenizer, quantisation."""
    return (yield from ask(ModelState, HttpCall("GET", "/v1/fleet/model")))


def manifest(digest: str) -> HttpSteps[Mapping[str, Any]]:
    """The manifest of a version by its digest. Raises Rejected `not_found`."""
    return (yield from get(f"/v1/manifests/{digest}"))


def history(limit: int | None = None) -> HttpSteps[list[Receipt]]:
    """Past receipts, newest first."""
    query = () if limit is None else (("limit", str(limit)),)
    return (yield from ask(_History, HttpCall("GET", "/v1/history", None, query))).receipts


def status(update: str) -> HttpSteps[UpdateState]:
    """State and timings of one update."""
    return (yield from ask(UpdateState, HttpCall("GET", update_path(update))))


def commit(update: str) -> HttpSteps[UpdateState]:
    """Let an update with `commit: manual` go on from READY."""
    return (yield from ask(UpdateState, _post(f"{update_path(update)}/commit")))


def seal(update: str, digests: Mapping[str, str] | None = None) -> HttpSteps[UpdateState]:
    """The stream is complete. `digests`: name -> 16 hex digits, of tensors that the manifest has none of."""
    return (yield from ask(UpdateState, _post(f"{update_path(update)}/seal", {"digests": dict(digests or {})})))


def abort(update: str, failures: Iterable[Failure] = ()) -> HttpSteps[UpdateState]:
    """End an undecided update. `failures`: what made you, with codes of `updater.protocol.api.CAUSES`."""
    causes = bodies(failures)
    return (
        yield from ask(UpdateState, _post(f"{update_path(update)}/abort", {"failures": causes} if causes else None))
    )


def renew(update: str) -> HttpSteps[UpdateState]:
    """The update is still wanted. Raises `lease_expired` or `wrong_phase` when it ended."""
    return (yield from ask(UpdateState, _post(f"{update_path(update)}/renew")))


# -- what they are made of


class _History(BaseModel):
    receipts: list[Receipt] = []


def begin_streamed(body: Mapping[str, Any], manifest: Manifest) -> HttpSteps[UpdateState]:
    """`begin` with a manifest, which is uploaded ahead where it is large."""
    text = manifest.to_json()
    if len(text) <= INLINE_MANIFEST:
        return (yield from begin({**body, "manifest": json.loads(text)}))
    read((yield from _answered(HttpCall("PUT", f"/v1/manifests/{manifest.digest}", text=text))))
    return (yield from begin({**body, "manifest": manifest.digest}))


def get(path: str) -> HttpSteps[Mapping[str, Any]]:
    """`GET path`: the JSON object as it came, also from a coordinator of another release."""
    return read((yield from _answered(HttpCall("GET", path))))


def ask(kind: type[M], call: HttpCall) -> HttpSteps[M]:
    """The answer of a success. Raises Rejected `not_found` for what another server than a coordinator answers."""
    answer = yield from _answered(call)
    document = read(answer)
    try:
        return kind.model_validate(document)
    except ValidationError:
        replica = document.get("replica")
        what = f"the replica {replica!r}" if isinstance(replica, str) else "another server, or one of another release"
        raise refuse(
            "not_found", f"no coordinator answers at {answer.server}: it is {what}", hint=ADDRESS_HINT
        ) from None


def _answered(call: HttpCall) -> HttpSteps[HttpAnswer]:
    """Sends the call again while no answer comes, unless it says otherwise; then raises Unavailable `unreachable`."""
    reason = ""
    for pause in (*BACKOFF_S, None):
        answer = yield call
        if isinstance(answer, HttpAnswer):
            return answer
        reason = answer.reason if answer else "no answer"
        if pause is None or not call.tries or (answer and not answer.again):
            break
        yield Wait(pause)
    text = f"no server answers {call.method} {call.path} at {reason}"
    raise Unavailable(Failure("unreachable", text, hint=UNREACHABLE_HINT))


def read(answer: HttpAnswer) -> Mapping[str, Any]:
    """The JSON object of a success, or the typed error that a problem document tells of."""
    try:
        document = json.loads(answer.body)
    except ValueError:
        document = None
    if 200 <= answer.status < 300 and isinstance(document, dict):
        return document
    if isinstance(document, dict) and isinstance(document.get("failures"), list):
        raise error_of(answer.status, document)
    told = error_of(answer.status, None, fallback="unreachable" if answer.status in _NO_SERVER else "not_found")
    text = f"{answer.server or 'the server'} answers with status {answer.status}, and not as a coordinator does"
    raise type(told)(replace(told.failures[0], message=text, hint=ADDRESS_HINT))


def update_path(update: str) -> str:
    return f"/v1/updates/{quote(update, safe='')}"


def _begin(body: Mapping[str, Any], wait_s: float | None = None) -> HttpCall:
    """`POST /v1/updates`. A repeat after a broken connection joins the update that the first one began: a path on disk
    has the coordinator's own id for that, `run-step`; everything else gets one here if it has none.
    """
    named = dict(body)
    if not _has_default(named):
        named.setdefault("id", fresh_id(named.get("version")))
    return _post("/v1/updates", named, wait_s)


def _post(path: str, body: Mapping[str, Any] | None = None, wait_s: float | None = None) -> HttpCall:
    """`wait_s`: how long to wait for the end of what is begun; None: the answer comes while it runs."""
    if wait_s is None:
        return HttpCall("POST", path, body)
    return HttpCall("POST", path, body, (("wait", "true"),), wait_s)


def _has_default(body: Mapping[str, Any]) -> bool:
    """Whether the same body, sent again, gets the same `run-step` and means the same update.

    A step of the next run does not: once it is live, the next run is another one.
    """
    source, policy = body.get("source"), body.get("policy")
    disk = "path" in body or (isinstance(source, Mapping) and source.get("kind", "disk") == "disk")
    if body.get("dry_run"):
        return False
    return disk and not (isinstance(policy, Mapping) and policy.get("new_run"))


def fresh_id(version: object) -> str:
    """Names one attempt to publish: the same version may be tried again, repaired, as another transaction."""
    if version is None:
        version = "dry-run"
    elif isinstance(version, Mapping):
        version = f"{version.get('run')}-{version.get('step')}"
    return f"{version}-{secrets.token_hex(4)}"
