"""What an operator says to one replica, past its coordinator: `liveweights readmit` and `liveweights release`."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from updater.cli import views
from updater.core.errors import Failure, LiveweightsError, Unavailable
from updater.core.participant import FrontStatus
from updater.protocol import problems, wire
from updater.server.security import Tokens

#: A readmission digests the live bytes of every rank: about 3 GB/s for each.
ANSWER_S = 900.0
_REPLICA = "give the replica's own address: `liveweights status` lists it"


def run(url: str, verb: str, body: Mapping[str, str], *, as_json: bool) -> None:
    """Ask and show what the replica is then. Raises LiveweightsError; nothing has changed then, or what it says."""
    status = ask(url, verb, body)
    if as_json:
        views.print_json(wire.plain(status))
        return
    by_hand = f", released by hand to {status.released.to.value}" if status.released else ""
    views.out.print(f"{status.replica}: {status.state.value} on {status.live_version}{by_hand}", markup=False)


def ask(url: str, verb: str, body: Mapping[str, str]) -> FrontStatus:
    token = Tokens.from_env().admin
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx.post(
            f"{url.rstrip('/')}/replica/v1/{verb}",
            json=dict(body),
            headers=headers,
            timeout=httpx.Timeout(ANSWER_S, connect=10.0),
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(Failure("unreachable", f"{url} does not answer: {error}", hint=_REPLICA)) from None
    if response.status_code != 200:
        raise _problem(url, response)
    try:
        status: FrontStatus = wire.decode(FrontStatus, response.content)
    except (wire.WireError, ValueError) as error:
        raise Unavailable(Failure("unreachable", f"{url} is no replica: {error}", hint=_REPLICA)) from None
    return status


def _problem(url: str, response: httpx.Response) -> LiveweightsError:
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("failures"), list):
        return problems.error_of(response.status_code, document)
    return Unavailable(Failure("unreachable", f"{url} is no replica: status {response.status_code}", hint=_REPLICA))
