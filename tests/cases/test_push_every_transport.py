"""A push: every transport into one replica.

The model has experts with a float32 router bias, and a head tied to its embedding that is sent beside it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from tests.cases.live_fleet import LiveFleet, live_fleet
from trainer_side import Client, Pusher, UpdateSession
from trainer_side.sources import as_source
from transports.buckets import Bucket
from transports.digest import tensor_digest, to_hex
from transports.registry import make_sender
from transports.stream import StreamSender
from updater.core.errors import Aborted, Failure, LiveweightsError, Rejected

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STREAMS = ("broadcast", "shared_memory")
TRANSPORTS = ("disk", *STREAMS)
BUCKET = 4096
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Stage:
    fleet: LiveFleet
    client: Client
    folder: Path
    weights: tuple[Tensors, Tensors]
    live: int = 0  # index of what serves
    step: int = 0

    def next(self) -> tuple[int, dict[str, torch.Tensor]]:
        """A fresh version, and the weights that do not serve: the head is the embedding, as a trainer holds it."""
        self.step += 1
        tensors = {name: tensor.clone() for name, tensor in self.weights[1 - self.live].items()}
        return self.step, {**tensors, HEAD: tensors[EMBEDDING]}

    def push(self, kind: str, tensors: Tensors | None = None) -> str:
        """Publish; the version."""
        step, other = self.next()
        with Pusher(self.fleet.url, "", transport=kind, directory=self.folder, bucket_bytes=BUCKET) as pusher:
            receipt = pusher.push(tensors or other, step)
        assert (receipt.outcome, receipt.proof) == ("committed", "digests")
        self.live = 1 - self.live
        return receipt.version

    def answers(self) -> str:
        """The version that a request is answered with."""
        (replica,) = self.fleet.replicas.values()
        answer = self.fleet.complete(replica.url)
        assert answer.status_code == 200, answer.text
        version: str = answer.json()["liveweights"]["version"]
        return version


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("push")
    paths = [
        make_toy_checkpoint(home / name, "M2", seed, tie_word_embeddings=True) for name, seed in (("a", 7), ("b", 8))
    ]
    old, new = (load_file(path / "model.safetensors") for path in paths)
    with live_fleet(home) as fleet, Client(fleet.url, "") as client:
        fleet.begin("two", paths[0], 2)
        fleet.admitted("two")
        yield Stage(fleet, client, home / "pushed", (old, new))


def session(stage: Stage, sender: StreamSender, step: int, tensors: Tensors) -> UpdateSession:
    source = as_source(tensors)
    return UpdateSession(
        stage.client, sender, source.specs, step, digests=source.digests(), ties=source.ties, bucket_bytes=BUCKET
    )


def put(update: UpdateSession, tensors: Tensors, count: int | None = None) -> None:
    for name in list(tensors)[:count]:
        update.put(name, tensors[name])


def _whole(update: UpdateSession, tensors: Tensors) -> None:
    put(update, tensors)
    update.seal()
    update.wait()


@pytest.mark.case("B105")
def test_what_was_pushed_is_what_every_rank_holds_whichever_way_it_went(stage: Stage) -> None:
    """Read back and digested, not 'the output changed'."""
    seen = []
    for kind in TRANSPORTS:
        stage.push(kind)
        seen.append(stage.fleet.digests("two"))
        stage.push(kind)
    assert seen[1:] == seen[:1] * (len(TRANSPORTS) - 1)
    assert seen[0] != stage.fleet.digests("two")


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
@pytest.mark.parametrize("kind", STREAMS)
def test_a_transport_that_reports_success_and_moved_nothing_is_refused_by_digest(stage: Stage, kind: str) -> None:
    step, tensors = stage.next()
    before = stage.fleet.view()
    sender = Forgetful(make_sender(kind))
    with pytest.raises(Aborted) as caught, session(stage, sender, step, tensors) as update:
        _whole(update, tensors)
    sender.close()
    assert {failure.code for failure in caught.value.failures} == {"tensor_digest"}
    assert {failure.tensor for failure in caught.value.failures} >= set(stage.weights[0])
    after = stage.fleet.view()
    assert (after.version, after.digests, after.answers) == (before.version, before.digests, before.answers)


@pytest.mark.case("B070")
def test_a_float32_router_bias_travels_as_float32_on_every_transport(stage: Stage) -> None:
    value = 1 + 2.0**-12  # bfloat16 cannot hold it
    seen = []
    for kind in TRANSPORTS:
        _step, tensors = stage.next()
        tensors[ROUTER_BIAS] = torch.full_like(tensors[ROUTER_BIAS], value)
        stage.push(kind, tensors)
        wanted = to_hex(tensor_digest(tensors[ROUTER_BIAS], "F32"))
        held = [set(rank.values()) for rank in stage.fleet.digests("two")]
        assert all(wanted in digests for digests in held)
        seen.append(stage.fleet.digests("two"))
        stage.push(kind)
    assert seen[1:] == seen[:1] * (len(TRANSPORTS) - 1)


@pytest.mark.case("B104")
@pytest.mark.parametrize("kind", STREAMS)
def test_an_ungathered_parameter_is_refused_before_anything_of_it_is_sent(stage: Stage, kind: str) -> None:
    step, tensors = stage.next()
    with pytest.raises(Rejected) as unasked, Pusher(stage.fleet.url, "", transport=kind) as pusher:
        pusher.push({**tensors, ROUTER_BIAS: torch.empty(0)}, step)
    assert (unasked.value.code, unasked.value.failures[0].tensor) == ("tensor_shape", ROUTER_BIAS)
    sender = make_sender(kind)
    with pytest.raises(Aborted) as caught, session(stage, sender, step, tensors) as update:
        put(update, {**tensors, ROUTER_BIAS: torch.empty(0)})
    sender.close()
    assert (caught.value.code, caught.value.failures[0].tensor) == ("tensor_shape", ROUTER_BIAS)
    assert stage.answers() != f"0-{step}"


@pytest.mark.parametrize("kind", STREAMS)
def test_a_tied_head_that_is_not_the_embedding_is_refused(stage: Stage, kind: str) -> None:
    """No rank stores it; it is digested as it passes."""
    step, tensors = stage.next()
    sender = make_sender(kind)
    other = {**tensors, HEAD: tensors[EMBEDDING] + 1}
    with pytest.raises(Aborted) as caught, session(stage, sender, step, other) as update:
        _whole(update, other)
    sender.close()
    assert {failure.tensor for failure in caught.value.failures} <= {HEAD, EMBEDDING}
    assert stage.answers() != f"0-{step}"


def _refused(update: UpdateSession, tensors: Tensors) -> None:
    _whole(update, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})


def _failed(update: UpdateSession, tensors: Tensors) -> None:
    put(update, tensors, 5)
    raise Aborted(Failure("internal", "the trainer gives up"))


def _sealed_short(update: UpdateSession, tensors: Tensors) -> None:
    """One chunk arrived, the next one never did, and the end is called all the same."""
    put(update, tensors, 5)
    update.interrupt("broken")
    update.seal()


@pytest.mark.case("B157", "B169")
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("end", [_refused, _failed, _sealed_short])
def test_whatever_a_stream_comes_to_the_replica_answers_on_what_is_live(
    stage: Stage, kind: str, end: Callable[[UpdateSession, Tensors], None]
) -> None:
    live = stage.answers()
    sender = make_sender(kind)
    step, tensors = stage.next()
    with pytest.raises(LiveweightsError), session(stage, sender, step, tensors) as update:
        end(update, tensors)
    assert stage.answers() == live == stage.fleet.get("/v1/version")["version"]
    sender.close()
    assert stage.push(kind) == stage.answers()


@pytest.mark.case("B168")
def test_the_version_is_set_by_the_commit_whichever_way_the_bytes_came(stage: Stage) -> None:
    for kind in TRANSPORTS:
        version = stage.push(kind)
        (front,) = (stage.fleet.front(replica.url) for replica in stage.fleet.replicas.values())
        assert {version} == {stage.answers(), front.live_version, stage.fleet.get("/v1/version")["version"]}
