"""Prometheus metrics of one coordinator, in a registry of its own."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from updater.core.version import Version
from updater.protocol.answers import Receipt

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts what ended; gauges are set when they are asked for."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._phase = Histogram(
            "liveweights_phase_seconds", "Seconds spent in one phase", ["phase"], buckets=_BUCKETS, registry=registry
        )
        self._updates = Counter(
            "liveweights_updates",
            "Updates by kind, outcome and reason",
            ["kind", "outcome", "reason"],
            registry=registry,
        )
        self._bytes = Counter("liveweights_read_bytes", "Bytes read from sources", registry=registry)
        self._closed = Counter("liveweights_closed_seconds", "Seconds of closed admission", registry=registry)
        self._pause = Histogram(
            "liveweights_pause_seconds", "Closed less quiesce of one commit", buckets=_BUCKETS, registry=registry
        )
        self._live = Gauge("liveweights_live_version", "Step that is live, by run", ["run"], registry=registry)
        self._members = Gauge("liveweights_members", "Members by state", ["state"], registry=registry)

    def ended(self, receipt: Receipt) -> None:
        """Count one update that ended."""
        self._updates.labels(receipt.kind, receipt.outcome, receipt.reason or "").inc()
        self._bytes.inc(receipt.bytes_read)
        for phase, milliseconds in receipt.phases_ms.items():
            self._phase.labels(phase).observe(milliseconds / 1e3)
        if receipt.pause is not None and receipt.kind != "catch_up":  # a joiner is shut anyway
            self._closed.inc(receipt.pause.closed_ms / 1e3)
            if receipt.outcome == "committed":
                self._pause.observe(receipt.pause.pause_ms / 1e3)

    def refused(self, kind: str, reason: str) -> None:
        """Count one that was refused at the door and has no receipt."""
        self._updates.labels(kind, "rejected", reason).inc()

    def render(self, live: Version | None, member_states: Iterable[str]) -> bytes:
        """The text of `/metrics`. A version of START shows as step -1 of run 0."""
        self._live.clear()
        if live is not None:
            self._live.labels(str(live.run)).set(live.step)
        self._members.clear()
        for state, count in Counts(member_states).items():
            self._members.labels(state).set(count)
        return generate_latest(self._registry)
