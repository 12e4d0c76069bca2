"""What a front says to its coordinator on its own: I am here, am I still the member, and I leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import httpx

from updater.core.errors import Failure, LiveweightsError, Unavailable
from updater.core.participant import Claimed, FrontStatus
from updater.core.release import older_coordinator
from updater.protocol import problems, wire

_log = logging.getLogger("liveweights.front")
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 5.0
#: The coordinator knows its members; asking again while joining only covers one that lost its memory meanwhile.
_REMIND_S = 10.0
#: No caller waits for the answer, and the next question comes soon.
_WATCH_DEADLINE_S = 5.0


class FleetClient:
    """`incarnation`: of the front now; a readmission changes it. `token`: the coordinator's admin token, or empty.

    `transport`: how the coordinator is reached, if not over sockets.
    """

    def __init__(
        self,
        coordinator: str,
        replica: str,
        url: str,
        incarnation: Callable[[], str],
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._replica, self._url, self._incarnation = replica, url, incarnation
        self.obstacle: Failure | None = None  # why it is not admitted, as it heard last
        self._said = ""
        self._last = ""  # the one that may be the member; empty if none is
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.AsyncClient(
            base_url=coordinator.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(30.0, connect=5.0),
            trust_env=False,
            transport=transport,
        )

    async def register(self, admitted: asyncio.Event) -> None:
        """Until the front was admitted. Retries whatever goes wrong: no other code could."""
        delay = _FIRST_RETRY_S
        while not admitted.is_set():
            try:
                await self._ask_in()
            except LiveweightsError as error:
                self.obstacle = error.failures[0]
                self._say(f"not registered yet: {error}")
                delay = min(delay * 2, _LAST_RETRY_S)
            else:
                delay = _REMIND_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(admitted.wait(), delay)

    def _say(self, text: str) -> None:
        """Once, not at every try."""
        if text != self._said:
            _log.warning("%s", text)
        self._said = text

    async def _ask_in(self) -> None:
        """An answer that got lost may have been a yes; only a no says that another process is the member."""
        mine = self._incarnation()
        self._last = mine
        try:
            body = {"replica": self._replica, "url": self._url}
            self.obstacle = self._why(await self._call("POST", "/v1/fleet/replicas", json=body))
            if self.obstacle is not None:
                self._say(f"not admitted yet: {LiveweightsError(self.obstacle)}")
        except LiveweightsError as error:
            if error.code == "replica_id_taken":
                self._last = ""
            raise

    def _why(self, answer: Any) -> Failure | None:
        """What a coordinator says of a joiner that it has not admitted, None if it says nothing."""
        if not isinstance(answer, dict):
            return None
        try:
            return wire.build(Failure, answer["failures"][0])
        except (TypeError, LookupError, ValueError):  # nothing is wrong, or it is of another release
            return older_coordinator(self._replica, str(answer.get("coordinator_release", "")))

    async def claim(self, said: FrontStatus) -> Claimed | None:
        """Whether the front that says this is still a member. None for silence, an error, and whatever is not exactly
        that document: they say nothing (I11). A gateway in between may answer anything, with any status.
        """
        body = {
            "incarnation": said.incarnation,
            "url": self._url,
            "fleet": said.fleet,
            "epoch": said.epoch,
            "serial": said.serial,
            "version": said.live_version,
            "digest": said.live_digest,
            "state": said.state.value,
        }
        try:
            async with asyncio.timeout(_WATCH_DEADLINE_S):
                answer = await self._call("POST", f"/v1/fleet/replicas/{self._replica}/claim", json=body)
            return wire.build(Claimed, answer)
        except (TimeoutError, LiveweightsError, wire.WireError) as error:
            _log.debug("nothing heard of the membership: %s", error)
            return None

    async def leave(self, deadline_s: float) -> None:
        """The front is shut for good: its silence must not block the next publication.

        Said of this life only: under the same id another process may be the member, and serve.
        """
        if not self._last:
            return
        params = {"confirm_dead": "true", "incarnation": self._last}
        try:
            async with asyncio.timeout(deadline_s):
                await self._call("DELETE", f"/v1/fleet/replicas/{self._replica}", params=params)
        except (TimeoutError, LiveweightsError) as error:
            _log.warning("left without saying so: %s", str(error) or "no answer")

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        """The JSON that was answered, or None. Raises LiveweightsError, Unavailable for no usable answer."""
        try:
            response = await self._client.request(method, path, **options)
            answer = response.json() if response.content else None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(Failure("unreachable", f"{type(error).__name__}: {error}")) from None
        except ValueError:
            raise Unavailable(Failure("unreachable", f"status {response.status_code} without JSON")) from None
        if response.status_code >= 400:
            raise problems.error_of(response.status_code, answer)
        return answer

    async def close(self) -> None:
        await self._client.aclose()
