"""What is no digest, id or name in a path is not found, and no error of the server's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from updater.server.guard import MEDIA_TYPE
from updater.server.routes import create_app
from updater.testing.service import LocalService

ODD = (
    "x",
    "not%20a%20digest",
    "..%2fjournal.sqlite3",
    "%2e%2e",
    "%00",
    "%ff",
    "%ed%a0%80",
    "%F0%9F%A6%8B",
    "0" * 64,
    "F" * 64,
    "0" * 63 + "%0a",
    "a" * 5000,
    "1-2",
    "-1",
    "99999999999999999999",
    "null",
)


def routes(service: LocalService) -> list[tuple[str, str]]:
    found = [each for each in create_app(service.coordinator).routes if isinstance(each, APIRoute)]
    return sorted((method, each.path) for each in found for method in each.methods or () if "{" in each.path)


@pytest.mark.case("F43")
def test_no_word_in_a_path_is_an_error_of_the_servers(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalService(tmp_path) as service:
            asked = routes(service)
            assert {path for _, path in asked} >= {"/v1/manifests/{digest}", "/v1/updates/{update_id}"}
            for method, path in asked:
                start, _, rest = path.partition("{")
                for odd in ODD:
                    target = start + odd + rest.partition("}")[2]
                    body = {"json": {}} if method in ("POST", "PUT") else {}
                    answer = await service.http.request(method, target, **body)
                    assert 400 <= answer.status_code < 500, (method, target, answer.text)
                    assert answer.headers["content-type"] == MEDIA_TYPE
            for odd in ODD[:9]:
                assert (await service.get(f"/v1/manifests/{odd}")).status_code == 404

    asyncio.run(asyncio.wait_for(main(), 120))
