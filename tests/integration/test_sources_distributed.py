"""Sharded trainers as sources: four processes shard a model in every way, and one process says what is right."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the program is a file beside this one, also for its ranks
from sources_program import CASES, ROUNDED, SIZE, STEPPED, adapted, made

from trainer_side.sources import as_source
from transports.digest import tensor_digest, to_hex

PROGRAM = Path(__file__).with_name("sources_program.py")
HANG_S = 900.0  # only a hang reaches it
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(2 * HANG_S)]

KINDS = {"whole": None, "rounded": ROUNDED}
Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    """What every rank wrote down, of all cases: one start of processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=open(folder / f"{rank}.err", "w"),  # noqa: SIM115
        )
        for rank in range(SIZE)
    ]
    try:
        codes = [rank.wait(HANG_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * SIZE, "\n".join((folder / f"{rank}.err").read_text()[-3000:] for rank in range(SIZE))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def expected(name: str, kind: str) -> dict[str, torch.Tensor]:
    """From one process, by other means: a state dict, peft's own merge, and a plain rounding."""
    model = copy.deepcopy(adapted()).merge_and_unload() if name == "fsdp2_lora" else made()  # type: ignore[operator]
    state: dict[str, torch.Tensor] = model.state_dict()
    if kind == "rounded":
        state = {
            each: tensor.to(torch.bfloat16) if tensor.is_floating_point() and ".gate." not in each else tensor
            for each, tensor in state.items()
        }
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_the_sender_gets_the_bytes_of_an_unsharded_model(name: str, kind: str, answers: Answers, folder: Path) -> None:
    sent: dict[str, torch.Tensor] = torch.load(folder / f"{name}-{kind}.pt", weights_only=True)
    right = expected(name, kind)
    assert set(sent) == set(right)
    for each, tensor in right.items():
        assert sent[each].dtype == tensor.dtype, each
        assert torch.equal(sent[each], tensor), each


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_digests_of_shards_are_those_of_the_whole_on_every_rank(name: str, kind: str, answers: Answers) -> None:
    right = {each: to_hex(tensor_digest(tensor)) for each, tensor in expected(name, kind).items()}
    if name == "fsdp2_lora":  # what is merged on the way has none ahead
        right = {each: digest for each, digest in right.items() if ".up.weight" not in each and ".down." not in each}
    assert [answer[name][kind]["digests"] for answer in answers] == [right] * SIZE


@pytest.mark.parametrize("name", CASES)
def test_every_rank_promises_the_same_and_one_of_them_sends(name: str, answers: Answers) -> None:
    for kind, dtypes in KINDS.items():
        told = [answer[name][kind] for answer in answers]
        right = expected(name, kind)
        for each in told:
            assert each["specs"] == told[0]["specs"]
            assert {(spec[0], tuple(spec[2])) for spec in each["specs"]} == {
                (n, tuple(t.shape)) for n, t in right.items()
            }
            assert each["ties"] == [["head.weight", "embed.weight"]]
            assert each["ranks"] == SIZE
        assert [each["sender"] for each in told] == [rank == CASES[name][1] for rank in range(SIZE)]
        assert [each["given"] for each in told] == [len(right) * (rank == CASES[name][1]) for rank in range(SIZE)]
        assert dtypes is None or {spec[1] for spec in told[0]["specs"]} == {"BF16", "F32", "I64"}


@pytest.mark.case("B035")
@pytest.mark.parametrize("name", STEPPED)
def test_a_step_in_between_is_seen_on_every_rank(name: str, answers: Answers) -> None:
    trained = sorted(name for name, tensor in made().state_dict().items() if tensor.is_floating_point())
    assert [answer[name]["moved"] for answer in answers] == [trained] * SIZE


def test_ranks_with_different_models_are_told_on_every_rank(answers: Answers) -> None:
    assert [answer["disagreeing"] for answer in answers] == ["manifest_mismatch"] * SIZE


def test_at_most_two_of_the_largest_tensor_and_a_shard_are_in_memory(answers: Answers) -> None:
    """Gathering by torch pads every shard and puts the tensor together once more. FSDP1 takes one tensor, only where
    it is sent. Digests take none: what is counted there is bookkeeping.
    """
    for rank, answer in enumerate(answers):
        for kind in ("fsdp2", "fsdp1"):
            assert answer["peaks"][kind]["digests"] < 0.05
        assert 1 <= answer["peaks"]["fsdp2"]["walk"] <= 2 + 1 / SIZE + 0.05
        assert answer["peaks"]["fsdp1"]["walk"] == pytest.approx(1 if rank == 0 else 0, abs=0.05)


def test_the_same_model_in_one_process_promises_the_same(answers: Answers) -> None:
    for kind, dtypes in KINDS.items():
        alone = as_source(made(), dtypes=dtypes)
        assert dict(alone.digests()) == answers[0]["fsdp2"][kind]["digests"]
