"""A replica that joins after a restart of the coordinator is compared with those that joined before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from updater.protocol import wire
from updater.protocol.model_config import config_part, quantisation_part
from updater.protocol.model_document import ModelDocument, config_hash
from updater.protocol.model_tokenizer import of_files
from updater.testing.fronts import SimulatedFront, settle
from updater.testing.service import LocalService

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 16, "rope_theta": 100.0, "rms_norm_eps": 1e-6}
WORDS = {"a": 0, "b": 1}


def document(config: dict[str, Any] = CONFIG, words: dict[str, int] = WORDS) -> ModelDocument:
    tokenizer = of_files(words, None, {}, b"")
    return ModelDocument(config=config_part(config), quantization=quantisation_part(config), tokenizer=tokenizer)


def describe(front: SimulatedFront, said: ModelDocument) -> None:
    front.document, front.config_hash = wire.encode(said).decode(), config_hash(said)


async def ask_in(
    service: LocalService, replica: str, said: ModelDocument, front: SimulatedFront | None = None
) -> tuple[int, dict[str, Any]]:
    front = front or service.fleet.add(replica, "start")
    describe(front, said)
    answer = await service.post("/v1/fleet/replicas", {"replica": replica, "url": front.url})
    await settle()
    return answer.status_code, answer.json()


def keys(problem: dict[str, Any]) -> set[str]:
    return {failure["message"].split(" ")[0] for failure in problem["failures"]}


async def members(service: LocalService) -> set[str]:
    return {member["replica"] for member in (await service.get("/v1/fleet")).json()["members"]}


OTHERS = {
    "config": (document(CONFIG | {"rms_norm_eps": 0.5}), {"rms_norm_eps"}),
    "overrides": (document(CONFIG | {"rope_theta": 37}), {"rope_parameters.rope_theta"}),
    "tokenizer": (document(words={"b": 0, "a": 1}), {"tokenizer.vocabulary"}),
    "all": (document(CONFIG | {"rms_norm_eps": 0.5, "rope_theta": 37}, {"a": 1}),
            {"rms_norm_eps", "rope_parameters.rope_theta", "tokenizer.vocabulary"}),
}  # fmt: skip


@pytest.mark.case("F02", "F64")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_who_differs_is_refused_by_key_although_the_coordinator_was_restarted(
    tmp_path: Path, name: str, restarts: int
) -> None:
    other, named = OTHERS[name]

    async def main() -> None:
        service = LocalService(tmp_path)
        await service.__aenter__()
        assert (await ask_in(service, "one", document()))[0] == 201
        for _ in range(restarts):
            await service.crash()
            service = LocalService(tmp_path, fleet=service.fleet, clock=service.clock)
            await service.__aenter__()
        status, problem = await ask_in(service, "two", other)
        assert (status, problem["code"], keys(problem)) == (422, "config_mismatch", named)
        assert all(failure["replica"] == "two" and failure["hint"] for failure in problem["failures"])
        assert await members(service) == {"one"}
        saved_anew = document(CONFIG | {"transformers_version": "9.9", "rope_theta": 100})
        assert (await ask_in(service, "two", saved_anew))[0] == 201
        await service.__aexit__(None, None, None)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.case("F02", "F64")
def test_while_no_member_answers_the_hash_of_the_journal_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A joiner is not kept out by a member that is silent; what cannot be compared then is a warning."""

    async def main() -> None:
        async with LocalService(tmp_path) as first:
            one = first.fleet.add("one", "start")
            assert (await ask_in(first, "one", document(), one))[0] == 201
            await first.crash()
            one.deaf = True
            async with LocalService(tmp_path, fleet=first.fleet, clock=first.clock) as second:
                status, problem = await ask_in(second, "two", OTHERS["config"][0])
                assert (status, problem["code"]) == (422, "config_mismatch")
                assert await members(second) == {"one"}
                assert (await ask_in(second, "two", OTHERS["tokenizer"][0]))[0] == 201
                assert any("tokenizer" in record.getMessage() for record in caplog.records)

    asyncio.run(asyncio.wait_for(main(), 60))
