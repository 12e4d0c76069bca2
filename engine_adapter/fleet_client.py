"""What a front says to its coordinator on its own: I am here, and I leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httpx

from updater import http

_log = logging.getLogger("liveweights.front")
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 5.0
#: The coordinator knows its members; asking again while joining only covers one that lost its memory meanwhile.
_REMIND_S = 10.0


class FleetClient:
    """`token`: the admin token of the coordinator, or empty."""

    def __init__(self, coordinator: str, replica: str, url: str, token: str = "") -> None:
        self._replica, self._url = replica, url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.AsyncClient(
            base_url=coordinator.rstrip("/"), headers=headers, timeout=httpx.Timeout(30.0, connect=5.0), trust_env=False
        )

    async def register(self, admitted: Callable[[], bool]) -> None:
        """Until the front was admitted. Retries whatever goes wrong: nobody else could."""
        delay = _FIRST_RETRY_S
        while not admitted():
            problem = await self._try("POST", "/v1/fleet/replicas", {"replica": self._replica, "url": self._url})
            if problem:
                _log.warning("not registered yet: %s", problem)
                delay = min(delay * 2, _LAST_RETRY_S)
            else:
                delay = _REMIND_S
            await asyncio.sleep(delay)

    async def leave(self, deadline_s: float) -> None:
        """The front is shut for good: its silence must not block the next publication."""
        try:
            async with asyncio.timeout(deadline_s):
                problem = await self._try("DELETE", f"/v1/fleet/replicas/{self._replica}?confirm_dead=true", None)
        except TimeoutError:
            problem = "no answer"
        if problem:
            _log.warning("left without saying so: %s", problem)

    async def _try(self, method: str, path: str, body: dict[str, str] | None) -> str:
        """Empty when it went well, else why not."""
        try:
            response = await self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code < 400:
            return ""
        try:
            return str(http.error_of(response.status_code, response.json()))
        except ValueError:
            return f"status {response.status_code}"

    async def close(self) -> None:
        await self._client.aclose()
