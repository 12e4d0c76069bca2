"""Fronts that call and are not members: shown to operators, who may want to adopt them."""

from __future__ import annotations

from collections.abc import Iterable

from updater.coordinator.clock import Clock
from updater.core.participant import Call
from updater.schemas import StrangerState

#: More than any operator reads; one more replaces the one that was heard of least recently.
KEPT = 1000


class Callers:
    """`watch_s`: how often fronts call. Who did not call for a few of those is not shown any more."""

    def __init__(self, clock: Clock, watch_s: float) -> None:
        self._clock, self._patience_s = clock, 5 * watch_s
        self._heard: dict[str, tuple[float, Call, str]] = {}

    def heard(self, call: Call, url: str, known: bool) -> None:
        self._heard.pop(call.replica, None)
        if not known:
            self._heard[call.replica] = (self._clock.now(), call, url)
            if len(self._heard) > KEPT:
                del self._heard[next(iter(self._heard))]

    def forget(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            self._heard.pop(replica, None)

    def strangers(self) -> list[StrangerState]:
        since = self._clock.now() - self._patience_s
        return [
            StrangerState(
                replica=call.replica,
                url=url,
                fleet=call.fleet,
                epoch=call.epoch,
                state=call.state.value,
                live_version=call.version,
                live_digest=call.digest,
            )
            for at, call, url in self._heard.values()
            if at >= since
        ]
