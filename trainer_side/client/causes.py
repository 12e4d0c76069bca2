"""Why a trainer gives an update up, in words that the coordinator takes from a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from updater.core.codes import TABLE
from updater.core.errors import Aborted, Failure, LiveweightsError
from updater.protocol.api import CAUSES, MAX_CAUSES, MAX_TEXT, PEER_CAUSES


def claimable(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Those of the failures that a client may tell of, shortened to what a request holds.

    The rest is not its own to tell: what a replica found out about itself, or that the client wanted to stop, which an
    abort says already.
    """
    mine = (each for each in failures if each.code in (PEER_CAUSES if each.replica else CAUSES))
    return tuple(dict.fromkeys(_short(failure) for failure in mine))[:MAX_CAUSES]


def bodies(failures: Iterable[Failure]) -> list[Mapping[str, Any]]:
    """As `updater.protocol.api.CauseBody`: without what is empty, and without the usual hint of the code."""
    return [
        {
            "code": each.code,
            "message": each.message,
            **({} if each.rank is None else {"rank": each.rank}),
            **{name: text for name in ("replica", "tensor", "file") if (text := getattr(each, name))},
            **({} if each.hint == TABLE[each.code].hint else {"hint": each.hint}),
        }
        for each in failures
    ]


def cause_of(error: BaseException, tensor: str = "", kind: type[LiveweightsError] = Aborted) -> LiveweightsError:
    """`error` if it is one of ours, else a `kind` with `rank_failed`: others are told its class, and here it stays the
    `__cause__`.
    """
    if isinstance(error, LiveweightsError):
        return error
    made = kind(Failure("rank_failed", f"{type(error).__name__} in the trainer", tensor=tensor))
    made.__cause__ = error
    return made


def _short(failure: Failure) -> Failure:
    """A path is known by its end, a text by its beginning."""
    return replace(
        failure,
        message=failure.message[:MAX_TEXT],
        tensor=failure.tensor[:MAX_TEXT],
        file=failure.file[-MAX_TEXT:],
        hint=failure.hint[:MAX_TEXT],
    )
