"""The OpenAPI documents of the coordinator and of a front are those of tests/golden, byte for byte.

`LIVEWEIGHTS_REGENERATE=1 pytest tests/unit/server/test_openapi.py` writes them anew. Read the difference before you
commit it: clients of an older release read what it says. Another release of FastAPI or pydantic may say the same in
other words.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from engine_adapter.replica.admission import Gate
from engine_adapter.replica.app import ReplicaApp, make_app
from engine_adapter.replica.completions import ModelText
from engine_adapter.testing.requests import HandEngine
from updater.server.guard import MEDIA_TYPE
from updater.server.routes import create_app
from updater.server.security import Tokens
from updater.testing.service import LocalService

GOLDEN = Path(__file__).parents[2] / "golden"


async def coordinator(folder: Path) -> FastAPI:
    async with LocalService(folder) as service:
        return create_app(service.coordinator)


async def front(_folder: Path) -> FastAPI:
    gate = Gate(HandEngine())
    return make_app(ReplicaApp("one", gate), gate, ModelText("toy", None, (), 256, 64), Tokens())


def written(document: dict[str, Any]) -> bytes:
    """Two documents that say the same are the same bytes. A problem that many routes answer with is written once."""
    problems = document["problems"] = {}
    for responses in (operation["responses"] for route in document["paths"].values() for operation in route.values()):
        for status, response in responses.items():
            if MEDIA_TYPE in response.get("content", ()) and problems.setdefault(status, response) == response:
                responses[status] = f"#/problems/{status}"
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


@pytest.mark.parametrize("app", [coordinator, front])
def test_the_api_is_the_one_that_was_promised(app: Any, tmp_path: Path) -> None:
    golden = GOLDEN / f"openapi-{app.__name__}.json"
    found = written(asyncio.run(app(tmp_path)).openapi())
    if os.environ.get("LIVEWEIGHTS_REGENERATE"):
        golden.write_bytes(found)
    assert found.decode() == golden.read_bytes().decode()
