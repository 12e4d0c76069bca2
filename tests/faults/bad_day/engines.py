"""What a fleet of the driver serves, and what every version of it must say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from updater.demo.clients import Expected

COUNT = 6  # checkpoints; versions go through them in turn, so that neighbours differ
_FIRST_SEED = 7
NAME = "served"  # of a vLLM's model, whatever folder it started on


@dataclass(frozen=True)
class Said:
    """What plain generation says: tokens, and per token how far the top logit is above the second."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Stand:
    """`expected`: per checkpoint, per prompt. `margin`: from a smaller one on, a reply is not compared.

    `options`: of the engine. `asking`: what a request needs beside prompt and length. `below`: where the participant
    contract lies on the engine's own server. `bucket_bytes`: of a stream; `clients`: that stream from each replica.
    `slower`: how many times longer than for toy engines it may take to answer.
    """

    engine: str
    checkpoints: tuple[Path, ...]
    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[tuple[Expected, ...], ...]
    max_tokens: int
    margin: float
    options: Mapping[str, Any] = field(default_factory=dict)
    asking: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    below: str = ""
    bucket_bytes: int = 4096
    clients: int = 2
    slower: float = 1.0

    @property
    def is_vllm(self) -> bool:
        return self.engine == "vllm"


def make_stand(engine: str, folder: Path) -> Stand:
    torch.set_num_threads(1)
    made = {"toy": _toy, "embedded": _embedded, "vllm": _vllm}[engine](folder)
    from transports.disk.manifests import write_manifest

    for checkpoint in made.checkpoints:
        write_manifest(str(checkpoint), lambda _bytes: None)
    return made


def _toy(folder: Path) -> Stand:
    from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
    from engine_adapter.testing.toy.reference import MARGIN, ToyReference

    checkpoints = tuple(make_toy_checkpoint(folder / f"c{i}", seed=_FIRST_SEED + i) for i in range(COUNT))
    prompts = tuple((5, 6, 7, 8, 9, 10, ending) for ending in range(20, 25))
    count = 12

    def said(reference: ToyReference, prompt: Sequence[int]) -> Said:
        tokens, margins = list[int](), list[float]()
        for _ in range(count):
            best = reference.logits([*prompt, *tokens]).topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return Said(tuple(tokens), tuple(margins))

    references = [ToyReference.load(checkpoint) for checkpoint in checkpoints]
    expected = tuple(tuple(said(reference, prompt) for prompt in prompts) for reference in references)
    return Stand("toy", checkpoints, prompts, expected, count, MARGIN, {"step_ms": 8.0})


def _embedded(folder: Path) -> Stand:
    from engine_adapter.models import make_versions, reference_tokens

    checkpoints = make_versions(folder, COUNT, seed=_FIRST_SEED)
    prefix = "The lighthouse keeper wrote down every ship that passed: "
    prompts = tuple(tuple((prefix + ending).encode()) for ending in ("the brig", "the sloop at dawn", "nothing today"))
    count = 16
    expected = tuple(tuple(reference_tokens(c, prompt, count) for prompt in prompts) for c in checkpoints)
    return Stand("transformers", checkpoints, prompts, expected, count, 1.0)


def _vllm(folder: Path) -> Stand:
    """Needs an environment that has vLLM."""
    from engine_adapter.models import encode, reference_tokens
    from engine_adapter.vllm.settings import PREFIX
    from tests.vllm_server.models import PROMPTS, make_checkpoint

    checkpoints = tuple(make_checkpoint(folder / f"v{i}", "llama", seed=_FIRST_SEED + i) for i in range(3))
    prompts = tuple(tuple(encode(prompt)) for prompt in PROMPTS)
    count = 16
    expected = tuple(tuple(reference_tokens(c, prompt, count) for prompt in prompts) for c in checkpoints)
    asking = {"ignore_eos": True, "temperature": 0, "return_token_ids": True, "model": NAME}
    # Two engines spin on two cores: each bucket waits until every rank has had its turn.
    return Stand(
        "vllm",
        checkpoints,
        prompts,
        expected,
        count,
        1.0,
        asking=asking,
        below=PREFIX,
        bucket_bytes=1 << 17,
        clients=1,
        slower=3.0,
    )


#: vLLM's processes wait for each other in a loop around `os.sched_yield`. Linux 6.18 counts every call as a whole slice
#: of processor time, so that a rank which waited long is not run again for minutes as soon as another process of its
#: session is busy on the same core, whatever serves from it. Sleeping is what vLLM does too, on Pythons before 3.11.1.
_PATIENT = "import os, time\nos.sched_yield = lambda: time.sleep(0.0001)\n"


def vllm_server(
    model: Path, ranks: int, port: int, told: Mapping[str, str], home: Path
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a stock vLLM that joins a fleet. `told`: variables of ours."""
    from tests.vllm_server.server import command_of, environment_of

    command = command_of(model, port, ranks, "bfloat16")
    command += ["--worker-extension-cls", "engine_adapter.vllm.worker.LiveweightsWorker", "--served-model-name", NAME]
    environment = environment_of(ranks, {"VLLM_PLUGINS": "liveweights", **told}, home)
    patient = home / "patient"
    patient.mkdir(exist_ok=True)
    (patient / "sitecustomize.py").write_text(_PATIENT)
    path = [str(patient), environment.get("PYTHONPATH", "")]
    return command, environment | {"PYTHONPATH": os.pathsep.join(part for part in path if part)}
