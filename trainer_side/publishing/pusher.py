"""`push(weights, version)`: from a trainer's weights, however it holds them, to a published version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, Unpack

from trainer_side.client import protocol
from trainer_side.client.client import Client
from trainer_side.client.handle import CoordinatorLink
from trainer_side.client.request import REQUEST_DEFAULTS, PushRequest, RequestOptions, complete, keywords
from trainer_side.publishing.backends import PushBackends
from trainer_side.publishing.background import Background, Rest, copied
from trainer_side.publishing.options import (
    PUSH_DEFAULTS,
    PUSHER_DEFAULTS,
    PusherOptions,
    PushOptions,
    parted,
)
from trainer_side.publishing.publish import follow, publish
from trainer_side.ranks.agreement import RankAgreement
from trainer_side.sources import as_source
from trainer_side.sources.casts import ENGINE, ROUNDED, Casts
from trainer_side.sources.choose import Weights
from trainer_side.sources.source import WeightSource
from updater.core.dtypes import wanted
from updater.core.errors import Failure, Rejected
from updater.core.version import Version
from updater.protocol.answers import Receipt
from updater.protocol.manifest import TensorSpec


class Pusher:
    """Publishes version after version. Holds the client and the sender, whose groups and buffers outlive a push.

    `options`: see `options.PusherOptions`. `link`: speaks to the coordinator instead of a client of `url`.

    Every rank of the trainer makes one and calls the same methods in the same order. One push at a time.
    """

    @keywords(PusherOptions, PUSHER_DEFAULTS)
    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        link: CoordinatorLink | None = None,
        **options: Unpack[PusherOptions],
    ) -> None:
        self._options = complete(options, PUSHER_DEFAULTS)
        self._client: Client | None = None
        if link is None:
            link = self._client = Client(url, token)
        self._link = link
        self._backends = PushBackends(link, self._options)
        self._one_at_a_time = threading.Lock()
        self._background = Background()

    @keywords(RequestOptions, REQUEST_DEFAULTS)
    def push(self, weights: Weights, version: int | str | Version, **options: Unpack[RequestOptions]) -> Receipt:
        """Publish and wait for the receipt, which every rank returns. See `push` of this module.

        `options`: see `request.RequestOptions`. A copy that is still being published in the background comes first.
        """
        request = PushRequest.of(version, **options)
        with self._one_at_a_time:
            self._background.settle()
            return self._rest(weights, request, copy=False)()

    @keywords(RequestOptions, REQUEST_DEFAULTS)
    def push_async(
        self, weights: Weights, version: int | str | Version, **options: Unpack[RequestOptions]
    ) -> Coroutine[Any, Any, Receipt]:
        """Copy the weights, return, and publish the copy in the background; the coroutine only waits for the receipt.

        Over disk the copy is the folder; else the sending rank holds all tensors in host memory meanwhile (on their
        device for `cuda_ipc`). The copy is collective, like a push. A bare step is taken as one of the run live now.
        """
        return _receipt(self._start(weights, PushRequest.of(version, **options)))

    def close(self) -> None:
        """After the last push. What was begun in the background is waited for."""
        self._background.close()
        self._backends.close()
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_caught: object) -> None:
        self.close()

    def _rest(self, weights: Weights, request: PushRequest, *, copy: bool) -> Rest:
        """What is left to do once a source is made and, with `copy`, the weights may be written to."""
        backends, dtypes = self._backends, self._options["dtypes"]
        folder = backends.folder(weights)
        if folder is not None:
            return lambda: follow(lambda: backends.as_it_lies(folder, request), True, RankAgreement(None))
        if dtypes == ENGINE:
            dtypes, fingerprint = _fitted(self._link, as_source(weights))
            request = replace(request, dtypes=fingerprint)
        source = as_source(weights, dtypes=dtypes)
        if copy:
            return copied(source, request, backends)
        return lambda: publish(source, lambda known: backends.sending(source, known, request))

    def _start(self, weights: Weights, request: PushRequest) -> Future[Receipt]:
        with self._one_at_a_time:
            self._background.settle()
            return self._background.begin(self._rest(weights, request, copy=True))


@keywords(PushOptions, PUSH_DEFAULTS)
def push(
    weights: Weights,
    version: int | str | Version,
    *,
    url: str | None = None,
    token: str | None = None,
    **options: Unpack[PushOptions],
) -> Receipt:
    """Publish `weights` as `version` and wait for the receipt. `Pusher` is the same for many versions.

    `weights`: a state dict, a module (also wrapped or sharded), any `WeightSource`, or the path of a checkpoint. On a
    trainer of several ranks every rank calls this, and every rank returns the receipt or raises the same error.
    `version`: a step of the current run, `run-step`, or a `Version`.
    `options`: `transport`, `directory`, `config_from`, `keep`, `shard_bytes`, `dtypes`, `bucket_bytes`, `stall_s`,
    `sender_options` as in `options.PusherOptions`; `policy`, `allow_suspicious`, `layouts`, `allow_config`, `hooks`,
    `id`, `base_version`, `lease_s`, `timeout_s`, `progress` as in `request.RequestOptions`.

    Raises Rejected, Aborted or RolledBack (with `error.receipt`, saying what is live), Unavailable, Unauthorized.
    """
    making, asking = parted(options)
    with Pusher(url, token, **making) as pusher:
        return pusher.push(weights, version, **asking)


@keywords(PushOptions, PUSH_DEFAULTS)
def push_async(
    weights: Weights,
    version: int | str | Version,
    *,
    url: str | None = None,
    token: str | None = None,
    **options: Unpack[PushOptions],
) -> Coroutine[Any, Any, Receipt]:
    """The async twin of `push`: copies the weights before it returns, so the trainer may step at once.

    The copy is published in the background; the coroutine that this returns waits for its receipt.
    """
    making, asking = parted(options)
    pusher = Pusher(url, token, **making)
    try:
        return _receipt(pusher._start(weights, PushRequest.of(version, **asking)), pusher)
    except BaseException:
        pusher.close()
        raise


def _fitted(link: CoordinatorLink, source: WeightSource) -> tuple[Casts, str]:
    """What the tensors of `source` are to be rounded to, and the fingerprint of what was read.

    The sending rank reads it and tells the others: the same on every rank, or the same error. Raises Rejected
    `tensor_dtype` for a tensor that the fleet does not hold as it comes: quantised, or something is computed from it.
    """
    ask = lambda: dict(link.run(protocol.get("/v1/fleet/dtypes")))  # noqa: E731
    told = RankAgreement(source.group).lead(ask if source.is_sender else None)
    return _casts_for(source.specs, told["dtypes"], source.ties), str(told["fingerprint"])


def _casts_for(specs: Mapping[str, TensorSpec], held: Mapping[str, Any], ties: Sequence[tuple[str, str]] = ()) -> Casts:
    """`held`: rules of `updater.core.dtypes`. A name that they do not know stays as it is, or as what it is tied to."""
    found = {name: wanted(held, name) for name, spec in specs.items() if spec.dtype in ROUNDED}
    for pair in ties:
        for one, other in (pair, pair[::-1]):
            if found.get(one) is None and found.get(other) is not None:
                found[one] = found[other]
    faults = [
        Failure(
            "tensor_dtype",
            "the fleet holds it quantised, or computes something from it",
            tensor=name,
            hint='pass the dtypes yourself: dtypes={"*": "BF16"}',
        )
        for name, dtype in found.items()
        if dtype == ""
    ]
    if faults:
        raise Rejected(*faults)
    return Casts(exact={name: dtype for name, dtype in found.items() if dtype})


async def _receipt(publishing: Future[Receipt], owned: Pusher | None = None) -> Receipt:
    try:
        return await asyncio.wrap_future(publishing)
    finally:
        if owned is not None:
            await asyncio.to_thread(owned.close)
