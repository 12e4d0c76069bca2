"""The trainer's side inside a Ray cluster: the same clients and the same push, carried by calls to the coordinator's
actor. Where a `Client` takes a URL, `ray://<actor name>@<namespace>` does the same as what is here.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from trainer_side.client import AsyncClient, Client
from trainer_side.pusher import push, push_async
from updater.core.version import Version
from updater.ray_calls import COORDINATOR, NAMESPACE, Handle, address_of
from updater.schemas import Receipt


class RayClient(Client):
    """A `Client` of the coordinator with this handle, name or address."""

    def __init__(self, coordinator: str | Handle = COORDINATOR, namespace: str = NAMESPACE) -> None:
        super().__init__(str(address_of(coordinator, namespace)))


class AsyncRayClient(AsyncClient):
    """The async twin of `RayClient`. A handle is asked for its address at once; a name costs nothing."""

    def __init__(self, coordinator: str | Handle = COORDINATOR, namespace: str = NAMESPACE) -> None:
        super().__init__(str(address_of(coordinator, namespace)))


def push_ray(
    weights: Any,
    version: int | str | Version,
    *,
    coordinator: str | Handle = COORDINATOR,
    namespace: str = NAMESPACE,
    **options: Any,
) -> Receipt:
    """`trainer_side.push` to a coordinator that is an actor; `options` are its."""
    return push(weights, version, url=str(address_of(coordinator, namespace)), **options)


def push_ray_async(
    weights: Any,
    version: int | str | Version,
    *,
    coordinator: str | Handle = COORDINATOR,
    namespace: str = NAMESPACE,
    **options: Any,
) -> Coroutine[Any, Any, Receipt]:
    """`trainer_side.push_async`, which copies before it returns."""
    return push_async(weights, version, url=str(address_of(coordinator, namespace)), **options)
