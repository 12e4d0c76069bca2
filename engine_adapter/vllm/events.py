"""The event stream of a vLLM route: says in the last event of each choice what made it.

vLLM sends no event for a request without a token. One that an update ended before its first would then be an empty
stream: it gets its last event here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from engine_adapter.vllm.replies import Reply

_FINISHED = b'"finish_reason":"'
_USAGE, _DONE = b'"choices":[]', b"data: [DONE]"  # what follows the last choice


class EventStream:
    """`add_versions`: completes one document in place. `path`: of the route, which decides how a choice looks."""

    def __init__(self, reply: Reply, path: str, add_versions: Callable[[dict[str, Any]], None]) -> None:
        self._reply, self._add_versions = reply, add_versions
        self._chat = path.endswith("/chat/completions")
        self._held = b""
        self._known: bytes = b""  # the last event that names the completion
        self._ended: set[int] = set()

    def feed(self, body: bytes, more: bool) -> bytes:
        """The events that are whole by now, ready to send. `more`: whether there is more to come."""
        *whole, self._held = (self._held + body).split(b"\n\n")
        if not more and self._held:
            whole.append(self._held)
            self._held = b""
        return b"".join(self._event(each) + b"\n\n" for each in whole)

    def _event(self, event: bytes) -> bytes:
        if event == _DONE or _USAGE in event:
            return self._unended() + event
        if not event.startswith(b"data: {"):
            return event
        self._known = event
        if _FINISHED not in event:
            return event
        document = _document(event)
        if document is None or "error" in document:
            return event
        self._ended |= {choice.get("index", 0) for choice in document.get("choices") or ()}
        self._add_versions(document)
        return b"data: " + plain(document)

    def _unended(self) -> bytes:
        """An event for every choice that an update ended and the route says nothing of."""
        if not self._reply.ended_by_update:
            return b""
        found = b""
        known = _document(self._known) or {}
        for index in range(self._reply.choices):
            if index in self._ended:
                continue
            self._ended.add(index)
            document = self._named(known) | {"choices": [self._choice(index)]}
            self._add_versions(document)
            found += b"data: " + plain(document) + b"\n\n"
        return found

    def _named(self, known: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        asked = _document(self._reply.asked) or {}
        fresh: dict[str, Any] = {"id": self._reply.parts[0].request_id, "object": kind}
        fresh |= {"created": int(time.time()), "model": asked.get("model", "")}
        return fresh | {key: known[key] for key in fresh if key in known}

    def _choice(self, index: int) -> dict[str, Any]:
        nothing: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return {"index": index, **nothing, "logprobs": None, "finish_reason": "abort", "stop_reason": None}


def plain(document: dict[str, Any]) -> bytes:
    """As vLLM writes JSON."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _document(text: bytes) -> dict[str, Any] | None:
    """The JSON object in an event or a body, if it is one."""
    try:
        document = json.loads(text.removeprefix(b"data: "))
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
