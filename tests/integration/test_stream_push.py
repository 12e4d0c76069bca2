"""Pushed streams into a live fleet of two tensor-parallel sizes: what arrives, and every way in which it does not.

One fleet serves all stories; each begins and ends with both replicas open on the same version.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from engine_adapter.testing.toy.reference import ToyReference
from tests.cases.live_fleet import PROMPT, TOKENS, LiveFleet, View, live_fleet
from tests.standing import stand_still
from trainer_side import Client, Hooks, Pusher, UpdateSession
from trainer_side.client.client import Canceller
from trainer_side.client.protocol import HttpCall, HttpSteps, NoAnswer
from trainer_side.sources import as_source
from transports.buckets import StreamPlan
from transports.registry import make_sender
from transports.stream import StreamSender
from updater.cli.main import app
from updater.core.errors import Aborted, LiveweightsError, Rejected
from updater.core.participant import StreamOffer
from updater.protocol import wire
from updater.protocol.answers import Receipt
from updater.protocol.manifest import TensorSpec

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STREAMS = ("broadcast", "shared_memory")
BUCKET = 4096  # several tensors share one, and the embedding needs three
#: How long a rank that stands still is waited for: the others, which stage behind everything else, are to be through
#: with what they were sent by then.
STALL_S = 10.0
HANG_S = 60.0
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Stage:
    """The fleet, two checkpoints in turn, and a sender per transport that outlives the stories."""

    fleet: LiveFleet
    paths: tuple[Path, Path]
    weights: tuple[Tensors, Tensors]
    client: Client
    senders: dict[str, StreamSender]
    live: int = 0  # index of what serves
    step: int = 0
    expected: list[list[int]] = field(default_factory=list)

    def next(self) -> tuple[int, Tensors]:
        """A fresh version and the weights that do not serve."""
        self.step += 1
        return self.step, self.weights[1 - self.live]

    def session(self, kind: str, tensors: Tensors | None = None, **more: Any) -> UpdateSession:
        step, other = self.next()
        source = as_source(tensors or other)
        options = {"bucket_bytes": BUCKET, "digests": source.digests(), **more}
        return UpdateSession(self.client, self.senders[kind], source.specs, step, **options)

    def publish(self, kind: str) -> Receipt:
        """The other weights, in the plain way."""
        step, tensors = self.next()
        with Pusher(self.fleet.url, "", transport=kind, bucket_bytes=BUCKET, directory=self.paths[0].parent) as pusher:
            receipt = pusher.push(tensors, step)
        self.live = 1 - self.live
        return receipt

    def view(self) -> View:
        view = self.fleet.view()
        assert {tokens for _s, tokens, _v in _frozen(view)} == {tuple(self.expected[self.live])}
        return view


def _frozen(view: View) -> list[tuple[int, tuple[int, ...], str]]:
    return [(status, tuple(tokens), version) for status, tokens, version in view.answers.values()]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("streams")
    paths = make_toy_checkpoint(home / "a", seed=7), make_toy_checkpoint(home / "b", seed=8)
    weights = load_file(paths[0] / "model.safetensors"), load_file(paths[1] / "model.safetensors")
    with live_fleet(home) as fleet, Client(fleet.url, "") as client:
        for name, tp in (("two", 2), ("one", 1)):
            fleet.begin(name, paths[0], tp)
        for name in ("two", "one"):
            fleet.admitted(name)
        senders = {kind: make_sender(kind) for kind in STREAMS}
        expected = [list(ToyReference.load(path).generate(PROMPT, TOKENS)) for path in paths]
        assert expected[0] != expected[1]
        try:
            yield Stage(fleet, paths, weights, client, senders, expected=expected)
        finally:
            for sender in senders.values():
                sender.close()


def put(update: UpdateSession, tensors: Tensors, names: Sequence[str] | None = None) -> None:
    for name in names if names is not None else tensors:
        update.put(name, tensors[name])


def halves(tensors: Tensors) -> tuple[list[str], list[str]]:
    names = list(tensors)
    return names[: len(names) // 2], names[len(names) // 2 :]


def broken_off(stage: Stage, tensors: Tensors, happens: Callable[[], object]) -> None:
    """A stream in the middle of which something `happens`."""
    first, rest = halves(tensors)
    with stage.session("broadcast") as update:
        put(update, tensors, first)
        happens()
        put(update, tensors, rest)
        update.seal()


@contextmanager
def refused(stage: Stage, *codes: str, kind: type[LiveweightsError] = Aborted) -> Iterator[list[LiveweightsError]]:
    """The block must end in an error whose first code is one of these, and leave everything as it was."""
    before = stage.view()
    caught: list[LiveweightsError] = []
    with pytest.raises(kind) as raised:
        yield caught
    caught.append(raised.value)
    assert raised.value.code in codes, raised.value
    assert raised.value.receipt is not None
    assert raised.value.receipt["outcome"] == "aborted"
    as_before(stage, before)


def as_before(stage: Stage, before: View) -> None:
    """Version, bytes of every rank, tokens and admission; nothing paused, no file held."""
    after = stage.view()
    for name in ("version", "fronts", "digests", "answers", "ready"):
        assert getattr(after, name) == getattr(before, name), name
    assert not any(rank.paused or rank.files for ranks in after.held.values() for rank in ranks)
    assert {rank.spare_bytes for ranks in after.held.values() for rank in ranks} == {
        rank.spare_bytes for ranks in before.held.values() for rank in ranks
    }


def goes_on(stage: Stage, kind: str) -> None:
    """The next update works."""
    assert stage.publish(kind).outcome == "committed"
    stage.view()


# -- what arrives


def test_a_version_is_the_same_bytes_through_every_transport(stage: Stage) -> None:
    before = stage.view()
    receipts, views = {}, {}
    for kind in ("disk", *STREAMS):
        receipts[kind] = stage.publish(kind)
        views[kind] = stage.view()
        back = stage.client.rollback()
        assert (back.outcome, back.kind) == ("committed", "rollback")
        stage.live = 1 - stage.live
        again = stage.view()
        assert (again.digests, again.fronts) == (before.digests, before.fronts)
    assert {receipt.proof for receipt in receipts.values()} == {"digests"}
    assert len({digest for receipt in receipts.values() for digest in receipt.observed.values()}) == 1
    assert all(receipt.tensors_changed > 0 for receipt in receipts.values())
    for kind in STREAMS:
        assert views[kind].digests == views["disk"].digests
        assert views[kind].digests != before.digests
        assert [tokens for _s, tokens, _v in views[kind].answers.values()] == [stage.expected[1 - stage.live]] * 2


@pytest.mark.parametrize("kind", STREAMS)
def test_the_sender_and_its_group_outlive_a_push(stage: Stage, kind: str) -> None:
    """The bytes of each come from one pusher, and another sender's push comes between them."""
    with Pusher(stage.fleet.url, "", transport=kind, bucket_bytes=BUCKET) as pusher:
        for turn in range(3):
            step, tensors = stage.next()
            assert pusher.push(tensors, step).outcome == "committed"
            stage.live = 1 - stage.live
            stage.view()
            if turn == 1:
                stage.publish(kind)


@pytest.mark.case("B192", "F26")
@pytest.mark.parametrize("kind", STREAMS)
def test_wider_weights_are_told_once_what_to_pass_and_fit_the_engine_by_themselves(stage: Stage, kind: str) -> None:
    step, tensors = stage.next()
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    before = stage.view()
    with Pusher(stage.fleet.url, "", transport=kind, bucket_bytes=BUCKET) as plain, pytest.raises(Rejected) as caught:
        plain.push(wide, step)
    as_before(stage, before)
    (group,) = caught.value.groups
    assert (group.code, group.count) == ("tensor_narrowing", len(caught.value.failures))
    assert group.tensors == len(wide)
    assert len(group.examples) == 1
    assert "dtypes=" in caught.value.hint
    assert len(str(caught.value)) < 600
    with Pusher(stage.fleet.url, "", transport=kind, bucket_bytes=BUCKET, dtypes="engine") as pusher:
        receipt = pusher.push(wide, step)
    assert (receipt.outcome, receipt.proof) == ("committed", "digests")
    stage.live = 1 - stage.live
    stage.view()


@pytest.mark.parametrize("kind", STREAMS)
def test_digests_that_are_computed_on_the_way_prove_as_much(stage: Stage, kind: str) -> None:
    with stage.session(kind, digests={}) as update:
        put(update, stage.weights[1 - stage.live])
        update.seal()
        receipt = update.wait()
    stage.live = 1 - stage.live
    assert receipt.proof == "digests"
    stage.view()


def test_a_manual_commit_waits_for_its_word_and_hooks_hear_of_it(stage: Stage) -> None:
    heard: list[str] = []
    staged = threading.Event()

    def on_staged(_state: object) -> None:
        heard.append("staged")
        staged.set()

    hooks = Hooks(on_staged, lambda _s: heard.append("paused"), lambda _r: heard.append("committed"))
    with stage.session("shared_memory", policy={"commit": "manual"}, hooks=hooks) as update:
        put(update, stage.weights[1 - stage.live])
        update.seal()
        assert staged.wait(HANG_S)
        assert stage.fleet.get("/v1/version")["version"] != f"0-{stage.step}"
        assert heard == ["staged"]
        update.commit()
        assert update.wait().outcome == "committed"
    stage.live = 1 - stage.live
    assert heard == ["staged", "paused", "committed"]
    stage.view()


@pytest.mark.parametrize("kind", STREAMS)
def test_the_command_streams_a_folder(stage: Stage, kind: str) -> None:
    """The engines could not read it themselves: it lies under no root of theirs."""
    step, _tensors = stage.next()
    with TemporaryDirectory() as elsewhere:
        folder = shutil.copytree(stage.paths[1 - stage.live], Path(elsewhere) / "checkpoint")
        options = ["--url", stage.fleet.url, "--transport", kind, "--json"]
        ran = CliRunner().invoke(app, ["push", str(folder), str(step), *options])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["version"] == f"0-{step}"
    stage.live = 1 - stage.live
    stage.view()


# -- what does not


@pytest.mark.parametrize("kind", STREAMS)
def test_keys_and_values_swapped_beside_the_right_digests_are_refused(stage: Stage, kind: str) -> None:
    tensors = dict(stage.weights[1 - stage.live])
    k, v = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    wrong = {**tensors, k: tensors[v], v: tensors[k]}
    with refused(stage, "tensor_digest") as caught, stage.session(kind, tensors) as update:
        put(update, wrong)
        update.seal()
        update.wait()
    assert {failure.tensor for failure in caught[0].failures} == {k, v}
    goes_on(stage, kind)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_sender_that_is_killed_loses_its_update(stage: Stage, kind: str) -> None:
    """Until then the stream is held, and requests are answered on the old version."""
    before = stage.view()
    step, _tensors = stage.next()
    arguments = [stage.fleet.url, str(stage.paths[1 - stage.live]), f"0-{step}", kind]
    command = [sys.executable, "-m", "tests.integration.stream_sender", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as trainer:
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == "half\n"
            for replica in stage.fleet.replicas.values():
                answer = stage.fleet.complete(replica.url).json()
                assert answer["choices"][0]["token_ids"] == stage.expected[stage.live]
            assert stage.client.status(f"killed-{kind}").phase == "staging"
        finally:
            trainer.send_signal(signal.SIGKILL)
    stage.fleet.until(lambda: stage.client.status(f"killed-{kind}").receipt is not None)
    receipt = stage.client.status(f"killed-{kind}").receipt
    assert receipt is not None
    assert (receipt.outcome, receipt.reason) == ("aborted", "peer_lost")
    assert {failure.replica for failure in receipt.failures} <= {"one", "two"}
    assert all(failure.rank is not None for failure in receipt.failures)
    as_before(stage, before)
    goes_on(stage, kind)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_rank_that_stands_still_is_named(stage: Stage, kind: str) -> None:
    fleet, tensors = stage.fleet, stage.weights[1 - stage.live]
    before = stage.view()
    session = stage.session(kind, id=f"stalled-{kind}", stall_s=STALL_S)
    pid = fleet.replicas["two"].pool.pids[1]
    caught: list[LiveweightsError] = []

    def trainer() -> None:
        try:
            with session as update:
                first, rest = halves(tensors)
                put(update, tensors, first)
                stand_still(pid)
                put(update, tensors, rest)
                update.seal()
        except LiveweightsError as error:
            caught.append(error)

    training = threading.Thread(target=trainer)
    training.start()
    try:
        begun: Callable[[], bool] = lambda: _phase(stage, f"stalled-{kind}") in ("discarding", "ended")  # noqa: E731
        fleet.until(begun)  # the sender's deadline has passed and the update is given up, with the rank still stopped
    finally:
        os.kill(pid, signal.SIGCONT)
    training.join(120)
    assert not training.is_alive()
    assert caught[0].code == "peer_timeout", caught[0]
    assert ("two", 1) in {(failure.replica, failure.rank) for failure in caught[0].failures}
    fleet.until(lambda: fleet.get("/v1/fleet")["phase"] == "idle" and _all_open(fleet))
    as_before(stage, before)
    goes_on(stage, kind)


def _phase(stage: Stage, update: str) -> str:
    try:
        return stage.client.status(update).phase
    except LiveweightsError:
        return ""


def _all_open(fleet: LiveFleet) -> bool:
    return {member["state"] for member in fleet.get("/v1/fleet")["members"]} == {"open"}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_client_that_aborts_stops_its_sender(stage: Stage, kind: str) -> None:
    first, rest = halves(stage.weights[1 - stage.live])
    tensors = stage.weights[1 - stage.live]
    with refused(stage, "client_abort"), stage.session(kind, id=f"given-up-{kind}") as update:
        put(update, tensors, first)
        stage.client.abort(f"given-up-{kind}")
        put(update, tensors, rest)
        update.seal()
    goes_on(stage, kind)


class Unrenewed:
    """A link over which no renewal gets through, and no event either."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def run(self, steps: HttpSteps[Any]) -> Any:
        return self._client.run(_without_renewals(steps))

    def events(self, update: str, cut: Canceller | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return self._client.events(update, cut)


def _without_renewals(steps: HttpSteps[Any]) -> HttpSteps[Any]:
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as done:
            return done.value
        lost = isinstance(step, HttpCall) and step.path.endswith("/renew")
        answer = NoAnswer("lost on the way") if lost else (yield step)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_lease_that_ends_stops_the_sender(stage: Stage, kind: str) -> None:
    step, tensors = stage.next()
    source = as_source(tensors)
    first, rest = halves(tensors)
    session = UpdateSession(
        Unrenewed(stage.client), stage.senders[kind], source.specs, step, lease_s=2.0, bucket_bytes=BUCKET
    )
    with refused(stage, "lease_expired"), session as update:
        put(update, tensors, first)
        assert session.ended(HANG_S)
        put(update, tensors, rest)
        update.seal()
    goes_on(stage, kind)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_plan_that_is_not_the_manifests_is_refused_before_a_byte(stage: Stage, kind: str) -> None:
    name = "model.norm.weight"
    step, tensors = stage.next()
    sender, specs = stage.senders[kind], dict(as_source(tensors).specs)
    before = stage.view()
    session = UpdateSession(stage.client, sender, specs, step, id=f"other-{kind}", bucket_bytes=BUCKET)
    session.begin()
    assert session.offered(HANG_S)
    offer = wire.build(StreamOffer, session._begun().state.offer.model_dump())  # type: ignore[union-attr]
    promised = {**specs, name: TensorSpec(name, "F32", specs[name].shape)}
    with pytest.raises(Aborted) as caught:
        sender.open(offer, StreamPlan(tuple(promised.values()), BUCKET), HANG_S)
    assert caught.value.code == "stream_mismatch"
    sender.finish(HANG_S, normal=False)
    assert session.ended(HANG_S)
    with pytest.raises(Aborted) as told:
        session.receipt()
    assert (told.value.code, told.value.failures[0].tensor) == ("stream_mismatch", name)
    session.leave()
    as_before(stage, before)
    goes_on(stage, kind)


@pytest.mark.parametrize("kind", ["disk", *STREAMS])
def test_an_optimiser_that_steps_in_the_middle_is_caught(stage: Stage, kind: str) -> None:
    step, tensors = stage.next()
    mine = {name: tensor.clone() for name, tensor in tensors.items()}
    before = stage.view()
    stepped: list[torch.Tensor] = []

    def progress(_bytes: int) -> None:
        if not stepped:
            stepped.append(mine["model.norm.weight"].add_(1))

    with Pusher(stage.fleet.url, "", transport=kind, bucket_bytes=BUCKET, directory=stage.paths[0].parent) as pusher:
        with pytest.raises(Aborted) as caught:
            pusher.push(mine, step, progress=progress)
        assert (caught.value.failures[0].code, caught.value.failures[0].tensor) == (
            "source_changed",
            "model.norm.weight",
        )
        as_before(stage, before)
        assert pusher.push({name: tensor.clone() for name, tensor in tensors.items()}, step).outcome == "committed"
    stage.live = 1 - stage.live
    stage.view()


def test_what_the_coordinator_refuses_at_the_door_is_raised_before_a_byte(stage: Stage) -> None:
    with pytest.raises(Rejected) as caught, Pusher(stage.fleet.url, "", transport="shared_memory") as pusher:
        pusher.push(stage.weights[0], 0)
    assert caught.value.code == "stale_version"


def test_nothing_grew(stage: Stage) -> None:
    """After all of the above: more failures and successes hold no more than the ones before, once it is at rest: a rank
    hears of the end of a sender and of its group when it looks.
    """

    def held() -> list[int]:
        return [
            count
            for name in stage.fleet.replicas
            for rank in stage.fleet.ranks(name)
            for count in (rank.descriptors, rank.threads)
        ]

    def at_rest() -> list[int]:
        before, now = [], held()
        while now != before:
            before, now = now, held()
        return now

    def no_more_than(before: list[int]) -> bool:
        return all(now <= then for now, then in zip(held(), before, strict=True))

    def once() -> None:
        for kind in STREAMS:
            tensors = stage.weights[1 - stage.live]
            with pytest.raises(Aborted), stage.session(kind) as update:
                put(update, tensors, halves(tensors)[0])
            goes_on(stage, kind)

    once()
    before = at_rest()
    once()
    once()
    stage.fleet.until(lambda: no_more_than(before))


# -- members that come and go; last, since they do not come back


def test_a_rank_that_dies_in_mid_stream_ends_the_update_and_the_others_go_on(stage: Stage) -> None:
    """Then its replica is replaced by one that starts on old bytes: it is enlisted in the next stream."""
    fleet, tensors = stage.fleet, stage.weights[1 - stage.live]
    before = fleet.digests("one")
    pid = fleet.replicas["two"].pool.pids[1]
    with pytest.raises(Aborted) as caught:
        broken_off(stage, tensors, lambda: os.kill(pid, signal.SIGKILL))
    assert ("two", 1) in {(failure.replica, failure.rank) for failure in caught.value.failures}
    assert caught.value.failures[0].code in ("rank_died", "peer_lost")
    assert fleet.digests("one") == before
    fleet.stop("two")
    fleet.until(lambda: len(fleet.get("/v1/fleet")["members"]) == 1)
    stage.publish("broadcast")
    fleet.begin("late", stage.paths[stage.live - 1], 1)
    fleet.until(lambda: len(fleet.get("/v1/fleet")["members"]) == 2)
    assert {member["replica"]: member["state"] for member in fleet.get("/v1/fleet")["members"]}["late"] == "joining"
    stage.publish("shared_memory")
    fleet.admitted("late")
    assert fleet.digests("late") == fleet.digests("one")
    stage.view()


def test_a_member_that_leaves_in_mid_stream_ends_the_update(stage: Stage) -> None:
    fleet, tensors = stage.fleet, stage.weights[1 - stage.live]
    *others, leaving = fleet.replicas
    with pytest.raises(Aborted) as caught:
        broken_off(stage, tensors, lambda: fleet.stop(leaving))
    assert leaving in {failure.replica for failure in caught.value.failures}
    fleet.until(lambda: len(fleet.get("/v1/fleet")["members"]) == len(others))
    goes_on(stage, "broadcast")
