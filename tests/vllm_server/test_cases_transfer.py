"""Transfers into stock vLLM: dtypes, values, bytes that never came, trainers that fail."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from engine_adapter.models import encode, reference_tokens
from tests.vllm_server.fleet import Fleet, Tensors, until
from tests.vllm_server.models import PROMPTS
from tests.vllm_server.test_cases import (
    COUNT,
    EMBEDDING,
    HEAD,
    NORM,
    QUERY,
    STREAMS,
    TRANSPORTS,
    UP,
    accepted,
    found,
    front,
    nothing_shows_before_the_commit,
    push,
    refused,
    refusing,
    serves,
    settled,
    tensors_of,
    view,
)
from trainer_side.client.session import promised
from trainer_side.sources import as_source
from transports.buckets import Bucket
from transports.registry import make_sender
from transports.stream import StreamSender
from updater.core.participant import SpareState
from updater.protocol import wire

NARROW = {"allow_narrowing": [["F32", "BF16"]]}
UNSAID = 259  # a token that no model here says or is asked about


@pytest.fixture
def fleet(llama_fleet: Fleet) -> Fleet:
    return settled(llama_fleet)


@pytest.fixture
def new(fleet: Fleet) -> Tensors:
    """The tensors that are not live."""
    return tensors_of(fleet.other)


# ----- dtypes, values, derived state


@pytest.mark.case("B070", "B105")
def test_the_bytes_are_the_same_whichever_way_they_came(fleet: Fleet) -> None:
    """And they are those that were sent: `accepted` compares what the ranks read back with the source's own digest."""
    said = []
    for transport in (*TRANSPORTS, TRANSPORTS[0]):
        there = accepted(fleet, tensors_of(fleet.other), transport)
        back = accepted(fleet, tensors_of(fleet.other), transport)
        said.append((there["observed"], back["observed"]))
        assert there["proof"] == ("structure_only" if transport == "disk" else "digests")
    assert said[1:] == said[:1] * 3


@pytest.mark.case("B070")
def test_a_lossy_cast_needs_the_policy(fleet: Fleet, new: Tensors) -> None:
    path, before = fleet.other, front(fleet).live_digest
    wide = {name: tensor.float() * (1 + 2**-12) for name, tensor in new.items()}
    assert found(refused(fleet, wide)) == {("tensor_narrowing", name) for name in wide}
    assert found(refused(fleet, wide, allow_narrowing=[["F32", "F16"]])) == {
        ("tensor_narrowing", name) for name in wide
    }
    receipt = push(fleet, wide, **NARROW)
    fleet.path = path
    now = view(fleet)
    assert now.tokens == reference_tokens(path, encode(PROMPTS[0]), COUNT).tokens
    assert (now.version, now.digests[0] != before) == (receipt["version"], True)


@pytest.mark.case("B070")
@pytest.mark.parametrize("transport", STREAMS)
def test_a_stream_is_never_narrowed(fleet: Fleet, new: Tensors, transport: str) -> None:
    """It is not read twice, so nothing could prove the cast."""
    failures = refused(fleet, {**new, NORM: new[NORM].float()}, transport, **NARROW)
    assert found(failures) == {("tensor_narrowing", NORM)}


@pytest.mark.case("B073")
def test_the_same_bytes_three_times_change_nothing(fleet: Fleet) -> None:
    fleet.publish(fleet.path)
    before = view(fleet)
    for _ in range(3):
        receipt = push(fleet, tensors_of(fleet.path))
        now = view(fleet)
        assert (receipt["tensors_changed"], now.version) == (0, receipt["version"])
        assert (now.tokens, now.scores, now.digests) == (before.tokens, before.scores, before.digests)


@pytest.mark.case("B074")
@pytest.mark.parametrize("transport", STREAMS)
def test_nothing_shows_between_chunks_and_everything_at_the_end(fleet: Fleet, new: Tensors, transport: str) -> None:
    receipt, path = nothing_shows_before_the_commit(fleet, new, transport, 64 << 10)
    serves(fleet, path, receipt)


@pytest.mark.case("B075")
@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_a_number_needs_the_policy(fleet: Fleet, new: Tensors, transport: str, value: float) -> None:
    path = fleet.other
    new[EMBEDDING][UNSAID, 7] = value
    new[HEAD][UNSAID, 0] = value if value < 0 else 0
    bad = {EMBEDDING, HEAD} if value < 0 else {EMBEDDING}
    assert found(refused(fleet, new, transport)) == {("tensor_nonfinite", name) for name in bad}
    push(fleet, new, transport, allow_nonfinite=True)
    fleet.path = path
    answer = fleet.server.complete(PROMPTS[0], COUNT)
    assert answer.tokens == reference_tokens(path, encode(PROMPTS[0]), COUNT).tokens


@pytest.mark.case("B075")
@pytest.mark.parametrize("transport", STREAMS)
def test_a_tensor_that_was_never_sent_is_refused(fleet: Fleet, new: Tensors, transport: str) -> None:
    failures = refused(fleet, new, transport, sent={name: tensor for name, tensor in new.items() if name != NORM})
    assert ("tensor_missing", NORM) in found(failures)


@pytest.mark.case("B085")
@pytest.mark.parametrize("transport", STREAMS)
def test_norms_that_arrive_as_zeros_are_refused_and_named(fleet: Fleet, new: Tensors, transport: str) -> None:
    norms = [name for name in new if "norm" in name][:3]
    failures = refused(fleet, new, transport, sent=new | {name: torch.zeros_like(new[name]) for name in norms})
    assert found(failures) == {("tensor_digest", name) for name in norms}


@pytest.mark.case("B085")
def test_a_norm_of_zeros_is_suspicious_also_where_the_trainer_means_it(fleet: Fleet, new: Tensors) -> None:
    new[NORM].zero_()
    receipt = push(fleet, new)
    suspicious = [warning for warning in receipt["warnings"] if NORM in warning]
    fleet.publish(fleet.path)
    assert len(suspicious) == 1
    assert QUERY not in suspicious[0]


# ----- transfers and their ends


class Forgetful:
    """A sender that hands out memory that no receiver reads: what it sends is whatever lay in its buffers."""

    def __init__(self, inner: StreamSender) -> None:
        self._inner = inner
        self.kind = inner.kind
        self.open, self.send, self.finish = inner.open, inner.send, inner.finish
        self.abort, self.close = inner.abort, inner.close

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def session(self) -> str:
        return self._inner.session

    def buffer(self, bucket: Bucket, deadline_s: float) -> torch.Tensor:
        self._inner.buffer(bucket, deadline_s).fill_(0)
        return torch.empty(bucket.nbytes, dtype=torch.uint8)


@pytest.mark.case("B105")
@pytest.mark.parametrize("transport", STREAMS)
def test_success_without_a_byte_is_refused(fleet: Fleet, new: Tensors, transport: str) -> None:
    failures = refused(fleet, new, transport, sender=Forgetful(make_sender(transport)))
    assert found(failures) == {("tensor_digest", name) for name in new}


#: Sends two buckets of five and says so, then waits to be killed.
_TRAINER = """
import sys, threading, torch
from safetensors.torch import load_file
from trainer_side import Client, UpdateSession
from trainer_side.sources import as_source
from transports.registry import make_sender
url, token, file, id, step, transport = sys.argv[1:]
tensors = load_file(file)
source = as_source(tensors)
size = sum(tensor.nbytes for tensor in tensors.values())
with Client(url, token) as client:
    sender = make_sender(transport)
    session = UpdateSession(client, sender, source.specs, int(step), id=id, bucket_bytes=size // 5, lease_s=5)
    with session:
        sent = 0
        for name, tensor in source.tensors():
            session.put(name, tensor)
            sent += tensor.nbytes
            if sent > 2 * size // 5:
                print("two", flush=True)
                threading.Event().wait()
"""


@pytest.mark.case("B089")
@pytest.mark.parametrize("transport", STREAMS)
def test_a_trainer_that_is_killed_leaves_the_server_to_the_next_one(fleet: Fleet, new: Tensors, transport: str) -> None:
    at, step = fleet.coordinator, next(fleet.steps)
    update = f"killed-{step}"
    arguments = [at.url, at.token, str(fleet.other / "model.safetensors"), update, str(step), transport]
    with refusing(fleet):
        trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, *arguments], stdout=subprocess.PIPE)
        with trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"two\n"
            trainer.kill()
        until(lambda: ended(fleet, update), "the update of the dead trainer ended", 60)
        assert receipt_of(fleet, update)["outcome"] == "aborted"
    accepted(fleet, new, transport)


def ended(fleet: Fleet, update: str) -> bool:
    return fleet.coordinator.get(f"/v1/updates/{update}")["receipt"] is not None


def receipt_of(fleet: Fleet, update: str) -> dict[str, Any]:
    found: dict[str, Any] = fleet.coordinator.get(f"/v1/updates/{update}")["receipt"]
    return found


@pytest.mark.case("B086", "B094")
@pytest.mark.parametrize("transport", STREAMS)
def test_a_trainer_that_begins_and_sends_nothing_loses_its_lease(fleet: Fleet, new: Tensors, transport: str) -> None:
    """The ranks wait for a sender that never comes; serving goes on all the while."""
    sender, source, step = make_sender(transport), as_source(new), next(fleet.steps)
    offer = {"kind": sender.kind, "address": sender.address, "session": sender.session}
    manifest = promised(source.specs.values(), source.digests())
    body = {"version": step, "source": offer, "manifest": wire.plain(manifest), "lease_s": 2.0, "id": f"idle-{step}"}
    with refusing(fleet):
        assert fleet.coordinator.client.post("/v1/updates", json=body).status_code == 202
        answer = fleet.server.complete(PROMPTS[0], 4)
        assert answer.body["liveweights"]["version"] == fleet.live
        until(lambda: ended(fleet, f"idle-{step}"), "the lease ended the update", 60)
        receipt = receipt_of(fleet, f"idle-{step}")
        assert (receipt["outcome"], receipt["reason"]) == ("aborted", "lease_expired")
    sender.close()
    accepted(fleet, new, transport)


@pytest.mark.case("B102")
@pytest.mark.parametrize("transport", STREAMS)
def test_tensors_larger_than_a_bucket_arrive(fleet: Fleet, new: Tensors, transport: str) -> None:
    accepted(fleet, new, transport, bucket_bytes=4096)


@pytest.mark.case("B104")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_ungathered_parameter_is_refused(fleet: Fleet, new: Tensors, transport: str) -> None:
    failures = refused(fleet, new | {UP: torch.empty(0, dtype=torch.bfloat16)}, transport)
    assert found(failures) == {("tensor_shape", UP)}
    assert "[0]" in failures[0].message


@pytest.mark.case("B104", "B175")
def test_every_shape_that_does_not_fit_is_listed(fleet: Fleet, new: Tensors) -> None:
    wrong = {NORM: new[NORM][:-1], QUERY: new[QUERY][:, :-2].contiguous()}
    failures = refused(fleet, new | wrong)
    assert found(failures) == {("tensor_shape", name) for name in wrong}
    assert front(fleet).spare.state in (SpareState.EMPTY, SpareState.PREVIOUS)
