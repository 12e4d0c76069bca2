"""Server-sent events whose data is JSON: the one writer and the one reader of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

EVENT_STREAM = "text/event-stream"


def event_text(data: Mapping[str, Any], name: str = "") -> str:
    """One event, with its end. Without a name it is a `message`, as a stream of completions has it."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n"


class EventParser:
    """Server-sent events line by line, as the WHATWG HTML standard describes the format."""

    def __init__(self) -> None:
        self._name = "message"
        self._data: list[str] = []

    def feed(self, line: str) -> tuple[str, Mapping[str, Any]] | None:
        """One line without its ending; the event that it completes as (name, data), if any. Comments and events without
        a JSON object are skipped.
        """
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
