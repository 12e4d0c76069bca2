"""What a client says and how it reads the answers, without IO: one implementation for the sync and the async client.

A flow is a generator: it yields a `Call` (or a `Wait`), is sent an `Answer` (or None when nothing answered), and
returns its result or raises a typed error.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

from trainer_side.causes import bodies
from updater.core.errors import Failure, Unavailable
from updater.manifest import Manifest
from updater.problems import error_of

T = TypeVar("T")

#: Waits between two tries of a call that nothing answered, in seconds. Every call of ours may be repeated.
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 4.0)
CALL_S = 30.0
NOBODY = "is `liveweights serve` running, and is this its address (--url, LIVEWEIGHTS_URL)?"
#: The same for an address where something else answers.
ADDRESS = "give the coordinator's address (--url, LIVEWEIGHTS_URL, or the argument url)"
#: What a proxy answers for a server that it cannot reach.
_NO_SERVER = (502, 504)
#: Characters of a manifest that may travel within a request; larger ones are uploaded first.
INLINE_MANIFEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `body` is sent as JSON, `text` as it is. `timeout_s` bounds the whole of it."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: tuple[tuple[str, str], ...] = ()
    timeout_s: float = CALL_S
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """`server`: the address that it came from."""

    status: int
    body: bytes
    server: str = ""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The connection was refused, broke, or took too long: the call may or may not have been handled.

    `again`: whether another try makes sense (not after a time-out: the caller's patience is spent).
    """

    reason: str
    again: bool = True


Flow = Generator[Call | Wait, Answer | NoAnswer | None, T]


def ask(call: Call) -> Flow[Mapping[str, Any]]:
    """The JSON object of a success. Tries again while nothing answers, then raises Unavailable `unreachable`."""
    reason = ""
    for pause in (*BACKOFF_S, None):
        answer = yield call
        if isinstance(answer, Answer):
            return read(answer)
        reason = answer.reason if answer else "no answer"
        if pause is None or (answer and not answer.again):
            break
        yield Wait(pause)
    raise Unavailable(Failure("unreachable", f"no server answers {call.method} {call.path} at {reason}", hint=NOBODY))


def begin(body: Mapping[str, Any], *, wait: bool, timeout_s: float) -> Flow[Mapping[str, Any]]:
    """`POST /v1/updates`. A repeat after a broken connection joins the update that the first one began: a path on disk
    has the coordinator's own id for that, `run-step`; everything else gets one here if it has none.
    """
    named = dict(body)
    if not _has_default(named):
        named.setdefault("id", fresh_id(named.get("version")))
    return (yield from ask(Call("POST", "/v1/updates", named, _wait(wait), timeout_s if wait else CALL_S)))


def rollback(body: Mapping[str, Any], *, wait: bool, timeout_s: float) -> Flow[Mapping[str, Any]]:
    """`POST /v1/rollback`."""
    named = dict(body)
    named.setdefault("id", fresh_id("rollback"))
    return (yield from ask(Call("POST", "/v1/rollback", named, _wait(wait), timeout_s if wait else CALL_S)))


def get(path: str, **query: object) -> Flow[Mapping[str, Any]]:
    """`GET path`; arguments that are None are left out."""
    given = tuple((key, str(value)) for key, value in query.items() if value is not None)
    return (yield from ask(Call("GET", path, None, given)))


def begin_streamed(body: Mapping[str, Any], manifest: Manifest) -> Flow[Mapping[str, Any]]:
    """`POST /v1/updates` with a manifest, which travels ahead by its content where it is large."""
    text = manifest.to_json()
    if len(text) <= INLINE_MANIFEST:
        named = {**body, "manifest": json.loads(text)}
    else:
        yield from ask(Call("PUT", f"/v1/manifests/{manifest.digest}", text=text))
        named = {**body, "manifest": manifest.digest}
    return (yield from begin(named, wait=False, timeout_s=CALL_S))


def seal(update: str, digests: Mapping[str, str]) -> Flow[Mapping[str, Any]]:
    """`POST /v1/updates/{id}/seal`: the stream is complete, and these digests are known only now."""
    return (yield from ask(Call("POST", f"{update_path(update)}/seal", {"digests": dict(digests)})))


def abort(update: str, failures: Iterable[Failure] = ()) -> Flow[Mapping[str, Any]]:
    """`POST /v1/updates/{id}/abort`, with what went wrong on this side, if anything did."""
    causes = bodies(failures)
    body = {"failures": causes} if causes else None
    return (yield from ask(Call("POST", f"{update_path(update)}/abort", body)))


def once(call: Call) -> Flow[Mapping[str, Any]]:
    """One try, for who comes back anyway. Raises Unavailable if nothing answered."""
    answer = yield call
    if not isinstance(answer, Answer):
        raise Unavailable(Failure("unreachable", answer.reason if answer else "no answer", hint=NOBODY))
    return read(answer)


def verb(update: str, name: str) -> Flow[Mapping[str, Any]]:
    """`POST /v1/updates/{id}/{renew, commit}`."""
    return (yield from ask(Call("POST", f"{update_path(update)}/{name}")))


def adopt(members: Mapping[str, str]) -> Flow[Mapping[str, Any]]:
    """`POST /v1/fleet/adopt`."""
    named = [{"replica": replica, "url": url} for replica, url in members.items()]
    return (yield from once(Call("POST", "/v1/fleet/adopt", {"members": named, "confirm": True})))


def update_path(update: str) -> str:
    return f"/v1/updates/{quote(update, safe='')}"


def events(lines: Iterator[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Server-sent events as (name, data); comments and events without JSON data are skipped."""
    parser = EventParser()
    for line in lines:
        event = parser.feed(line)
        if event is not None:
            yield event


class EventParser:
    """Line by line, as the WHATWG HTML standard describes the format of event streams."""

    def __init__(self) -> None:
        self._name = "message"
        self._data: list[str] = []

    def feed(self, line: str) -> tuple[str, Mapping[str, Any]] | None:
        """One line without its ending; the event that it completes, if any."""
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
            return None
        name, text = self._name, "\n".join(self._data)
        self._name, self._data = "message", []
        try:
            data = json.loads(text) if text else None
        except ValueError:
            return None
        return (name, data) if isinstance(data, dict) else None


def read(answer: Answer) -> Mapping[str, Any]:
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
    raise type(told)(replace(told.failures[0], message=text, hint=ADDRESS))


def _wait(wait: bool) -> tuple[tuple[str, str], ...]:
    return (("wait", "true"),) if wait else ()


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
