"""The event stream of an engine's route: says in the last event of each choice what made it, or why it broke.

An engine may send no event for a request without a token. One that an update ended before its first token would then
be an empty stream: it gets its last event here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from engine_adapter.hosted.replies import Reply, json_object
from updater.core.errors import LiveweightsError

_FINISHED = b'"finish_reason":"'
_USAGE, _DONE = b'"choices":[]', b"data: [DONE]"  # what follows the last choice
_ERROR = b'data: {"error":'
#: Routes whose events we can write -> what their objects are called, and what a choice has where nothing was made.
_EMPTY: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("text_completion", {"text": ""}),
    "/v1/chat/completions": ("chat.completion.chunk", {"delta": {}}),
}


class EventStream:
    """`add_versions`: completes one document in place. `told`: makes a document of an error. `path`: of the route."""

    def __init__(
        self,
        reply: Reply,
        path: str,
        add_versions: Callable[[dict[str, Any]], None],
        told: Callable[[LiveweightsError], dict[str, Any]],
    ) -> None:
        self._reply, self._path, self._add_versions, self._told = reply, path, add_versions, told
        self._held = b""
        self._known: bytes = b""  # the last event that names the completion
        self._ended: set[int] = set()
        self._failed = False

    def feed(self, body: bytes, more: bool) -> bytes:
        """The events that are whole by now, ready to send. `more`: whether there is more to come."""
        *whole, self._held = (self._held + body).split(b"\n\n")
        if not more and self._held:
            whole.append(self._held)
            self._held = b""
        return b"".join(self._event(each) for each in whole)

    def _event(self, event: bytes) -> bytes:
        if event.startswith(_ERROR):
            self._failed = True
        elif event == _DONE or _USAGE in event:
            return self._unended() + event + b"\n\n"
        elif event.startswith(b"data: {"):
            self._known = event
            if _FINISHED in event:
                return self._last(event)
        return event + b"\n\n"

    def _last(self, event: bytes) -> bytes:
        """The last event of a choice."""
        if self._reply.failure is not None:
            return self._broken(self._reply.failure)
        document = json_object(event.removeprefix(b"data: "))
        if document is None or "error" in document:
            return event + b"\n\n"
        self._ended |= {choice.get("index", 0) for choice in document.get("choices") or ()}
        return self._whole(document)

    def _broken(self, failure: LiveweightsError) -> bytes:
        """Once, in the place of what would look like an end."""
        if self._failed:
            return b""
        self._failed = True
        return b"data: " + plain({"error": self._told(failure)}) + b"\n\n"

    def _unended(self) -> bytes:
        """An event for every choice that an update ended and the route says nothing of."""
        if self._reply.failure is not None:
            return self._broken(self._reply.failure)
        if not self._reply.ended_by_update or self._path not in _EMPTY:
            return b""
        missing = [index for index in range(self._reply.choices) if index not in self._ended]
        self._ended |= set(missing)
        return b"".join(self._whole(self._named() | {"choices": [self._choice(index)]}) for index in missing)

    def _whole(self, document: dict[str, Any]) -> bytes:
        self._add_versions(document)
        return b"data: " + plain(document) + b"\n\n"

    def _named(self) -> dict[str, Any]:
        known = json_object(self._known.removeprefix(b"data: ")) or {}
        fresh: dict[str, Any] = {"id": self._reply.parts[0].request_id, "object": _EMPTY[self._path][0]}
        fresh |= {"created": int(time.time()), "model": self._reply.body.get("model", "")}
        return fresh | {key: known[key] for key in fresh if key in known}

    def _choice(self, index: int) -> dict[str, Any]:
        nothing = _EMPTY[self._path][1]
        return {"index": index, **nothing, "logprobs": None, "finish_reason": "abort", "stop_reason": None}


def plain(document: dict[str, Any]) -> bytes:
    """Compact JSON, as the engines' own routes write it."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
