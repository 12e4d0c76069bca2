"""Names against stock vLLM, and what the cases in the files beside this one use.

`refusing` is what REFUSED means here: as far as can be seen from
outside, everything is as it was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_adapter.model_files import write_safetensors
from engine_adapter.models import encode, reference_tokens
from tests.vllm_server.fleet import PREFIX, Fleet, Tensors, until
from tests.vllm_server.models import PROMPTS
from trainer_side.client.client import Client
from trainer_side.client.session import UpdateSession
from trainer_side.sources import as_source
from transports.buckets import BUCKET_BYTES
from transports.digest import tensor_digest, to_hex
from transports.dtypes import DTYPE_NAMES
from transports.registry import make_sender
from transports.stream import StreamSender
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import FrontState, FrontStatus, SpareState
from updater.protocol import wire
from updater.protocol.manifest import TensorEntry, content_digest

STREAMS = ("shared_memory", "broadcast")
TRANSPORTS = ("disk", *STREAMS)
COUNT = 32
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
Found = set[tuple[str, str]]


@dataclass(frozen=True)
class View:
    """Label, bytes as far as they decide anything, admission, what is held. `scores`: log-probabilities of every token
    of a prompt, which no cache shortens: all weights are in them, and they are compared to the last bit."""

    version: str
    digests: tuple[str, str]  # the fleet's, the replica's
    tokens: tuple[int, ...]
    spans: tuple[str, ...]
    scores: tuple[float, ...]
    open: bool
    files: frozenset[str]


def view(fleet: Fleet) -> View:
    live, status = fleet.coordinator.get("/v1/version"), front(fleet)
    assert status.spare.state in (SpareState.EMPTY, SpareState.PREVIOUS)
    assert (status.in_flight, status.waiting, status.staged_serial) == (0, 0, 0)
    answer = fleet.server.complete(PROMPTS[0], COUNT, prompt_logprobs=0)
    ranked = answer.body["choices"][0]["prompt_logprobs"][1:]
    return View(
        version=live["version"],
        digests=(live["digest"], status.live_digest),
        tokens=answer.tokens,
        spans=tuple(span["version"] for span in answer.body["liveweights"]["spans"]),
        scores=tuple(token["logprob"] for position in ranked for token in position.values()),
        open=status.state is FrontState.OPEN and fleet.server.client.get("/readyz").status_code == 200,
        files=frozenset(_open_below(fleet)),
    )


def front(fleet: Fleet) -> FrontStatus:
    """What the replica itself says."""
    url = f"{fleet.server.url}{PREFIX}/participant/v1/status"
    answer = fleet.coordinator.client.post(url, json={})
    assert answer.status_code == 200, answer.text
    return wire.decode(FrontStatus, answer.content)


def _open_below(fleet: Fleet) -> Iterator[str]:
    for process in fleet.server.processes():
        yield from (file.path for file in process.open_files() if file.path.startswith(str(fleet.home)))


@contextmanager
def refusing(fleet: Fleet) -> Iterator[None]:
    """REFUSED: as it was before the block, and open."""
    before = view(fleet)
    yield
    after = view(fleet)
    assert after == before
    assert (after.open, set(after.spans)) == (True, {after.version})
    assert {file for file in after.files if file.endswith(".safetensors")} == set()


def tensors_of(folder: Path) -> Tensors:
    return dict(sorted(load_file(folder / "model.safetensors").items()))


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Content digest of these tensors, from their bytes alone."""
    return content_digest(
        TensorEntry(name, DTYPE_NAMES[t.dtype], tuple(t.shape), to_hex(tensor_digest(t))) for name, t in tensors.items()
    )


def write(fleet: Fleet, tensors: Tensors) -> Path:
    """A checkpoint like the others, with these tensors in it."""
    folder = Path(tempfile.mkdtemp(dir=fleet.home)) / "model"
    copytree(fleet.first, folder)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): tensor for name, tensor in tensors.items()}


def push(
    fleet: Fleet,
    tensors: Tensors,
    transport: str = "disk",
    *,
    sender: StreamSender | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    sent: Tensors | None = None,
    **policy: Any,
) -> dict[str, Any]:
    """Publish; the receipt. Over disk as an engine's own folder, bare; as a stream with the digests of `tensors`
    promised, in the order of `tensors`. `sent`: other tensors that go over the wire in their place.

    Raises LiveweightsError with what it was refused for.
    """
    if transport == "disk":
        answer = fleet.coordinator.push(write(fleet, tensors), next(fleet.steps), expect=None, policy=policy)
        if "outcome" in answer and answer["outcome"] == "committed":
            return answer
        failures = [wire.build(Failure, each) for each in answer["failures"]]
        raise LiveweightsError(*failures, receipt=answer.get("receipt"))
    with streaming(fleet, tensors, transport, sender=sender, bucket_bytes=bucket_bytes, **policy) as session:
        for name, tensor in (sent or tensors).items():
            session.put(name, tensor)
        session.seal()
        return session.wait().model_dump()


@contextmanager
def streaming(
    fleet: Fleet,
    tensors: Tensors,
    transport: str,
    *,
    sender: StreamSender | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    promise: bool = True,
    **policy: Any,
) -> Iterator[UpdateSession]:
    source, sending = as_source(tensors), sender or make_sender(transport)
    try:
        with (
            Client(fleet.coordinator.url, fleet.coordinator.token) as client,
            UpdateSession(
                client,
                sending,
                {name: source.specs[name] for name in tensors},
                next(fleet.steps),
                digests=source.digests() if promise else {},
                policy=policy,
                bucket_bytes=bucket_bytes,
            ) as session,
        ):
            yield session
    finally:
        sending.close()


def refused(fleet: Fleet, tensors: Tensors, transport: str = "disk", **options: Any) -> tuple[Failure, ...]:
    """Why, as the receipt says where there is one; nothing else has happened."""
    with refusing(fleet), pytest.raises(LiveweightsError) as caught:
        push(fleet, tensors, transport, **options)
    if caught.value.receipt is None:
        return caught.value.failures
    return tuple(wire.build(Failure, each) for each in caught.value.receipt["failures"])


def found(failures: tuple[Failure, ...]) -> Found:
    return {(failure.code, failure.tensor) for failure in failures}


def accepted(fleet: Fleet, tensors: Tensors, transport: str = "disk", **options: Any) -> dict[str, Any]:
    """Publish tensors whose values are those of the checkpoint that is not live: its bytes and its tokens are there."""
    path = fleet.other
    receipt = push(fleet, tensors, transport, **options)
    fleet.path = path
    serves(fleet, path, receipt)
    return receipt


def serves(fleet: Fleet, path: Path, receipt: Mapping[str, Any]) -> None:
    now = view(fleet)
    assert set(receipt["observed"].values()) == {digest_of(tensors_of(path))} == set(now.digests)
    assert now.tokens == reference_tokens(path, encode(PROMPTS[0]), COUNT).tokens
    assert (now.version, set(now.spans), now.open) == (receipt["version"], {receipt["version"]}, True)


def settled(fleet: Fleet) -> Fleet:
    """On one of its two checkpoints, whatever the test before has left."""
    if fleet.coordinator.get("/v1/version")["digest"] != digest_of(tensors_of(fleet.path)):
        fleet.publish(fleet.first)
    return fleet


def nothing_shows_before_the_commit(
    fleet: Fleet, new: Tensors, transport: str, bucket_bytes: int
) -> tuple[dict[str, Any], Path]:
    """Three chunks, with a request after each and one more when all is staged and verified; the receipt, and what is
    live since."""
    path, old, names = fleet.other, view(fleet), list(new)

    def old_serves() -> bool:
        answer = fleet.server.complete(PROMPTS[0], COUNT)
        return (answer.tokens, answer.body["liveweights"]["version"]) == (old.tokens, old.version)

    with streaming(fleet, new, transport, bucket_bytes=bucket_bytes, commit="manual") as session:
        for chunk in range(3):
            for name in names[chunk * len(names) // 3 : (chunk + 1) * len(names) // 3]:
                session.put(name, new[name])
            assert old_serves()
        session.seal()
        until(lambda: fleet.coordinator.get("/v1/fleet")["phase"] == "ready", "the update is staged and verified")
        assert old_serves()
        session.commit()
        receipt = session.wait().model_dump()
    fleet.path = path
    return receipt, path


@pytest.fixture
def fleet(llama_fleet: Fleet) -> Fleet:
    return settled(llama_fleet)


@pytest.fixture
def new(fleet: Fleet) -> Tensors:
    """The tensors that are not live."""
    return tensors_of(fleet.other)


# ----- names


@pytest.mark.case("B036")
@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_one_misspelt_name_lists_one_unknown_and_one_missing(fleet: Fleet, new: Tensors, transport: str) -> None:
    misspelt = renamed(new, lambda name: name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upp_proj"))
    failures = refused(fleet, misspelt, transport)
    strange = "model.layers.1.mlp.upp_proj.weight"
    assert found(failures) == {("tensor_unexpected", strange), ("tensor_missing", UP)}
    assert [UP in each.message for each in failures if each.tensor == strange] == [True]  # the nearest name


@pytest.mark.case("B036")
def test_a_partial_update_is_refused_and_never_taken_for_a_whole_one(fleet: Fleet, new: Tensors) -> None:
    del new[UP]
    assert {code for code, _ in found(refused(fleet, new, partial=True))} == {"mode_unsupported"}
    assert found(refused(fleet, new)) == {("tensor_missing", UP)}


@pytest.mark.case("B037")
def test_all_names_renamed_match_none_on_disk_and_in_memory(fleet: Fleet, new: Tensors) -> None:
    strange = renamed(new, lambda name: "net." + name.replace("_proj", ".to"))
    over_disk, streamed = (refused(fleet, strange, transport) for transport in ("disk", "shared_memory"))
    assert found(over_disk) == found(streamed)
    assert found(over_disk) == {("tensor_unexpected", name) for name in strange} | {
        ("tensor_missing", name) for name in new
    }


@pytest.mark.case("B037")
def test_the_refusal_counts_what_matched(fleet: Fleet, new: Tensors) -> None:
    failures = refused(fleet, renamed(new, lambda name: "net." + name))
    assert any(f"0 of {len(new)} " in each.message for each in failures)


@pytest.mark.case("B040")
def test_an_untied_model_without_its_head_is_refused(fleet: Fleet, new: Tensors) -> None:
    """Neither filled with the embedding nor left at what it was."""
    del new[HEAD]
    assert found(refused(fleet, new)) == {("tensor_missing", HEAD)}


@pytest.mark.case("B040")
def test_the_refusal_names_the_flag_of_the_config(fleet: Fleet, new: Tensors) -> None:
    del new[HEAD]
    assert "tie_word_embeddings" in refused(fleet, new)[0].message


@pytest.mark.case("B043")
@pytest.mark.parametrize("inner", ["", ".base_layer"])
def test_names_under_an_adapter_reach_the_same_parameters(fleet: Fleet, new: Tensors, inner: str) -> None:
    accepted(fleet, renamed(new, lambda name: f"base_model.model.{name}".replace("_proj.", f"_proj{inner}.")))


@pytest.mark.case("B043")
def test_both_forms_of_one_parameter_are_refused(fleet: Fleet, new: Tensors) -> None:
    both = [f"base_model.model.{QUERY}", f"base_model.model.{QUERY.replace('.weight', '.base_layer.weight')}"]
    failures = refused(fleet, new | dict.fromkeys(both, new[QUERY]) | {QUERY: new[QUERY]})
    assert found(failures) == {("tensor_duplicate", name) for name in (*both, QUERY)}


@pytest.mark.case("B045")
def test_an_adapter_whose_keys_match_nothing_is_refused_with_the_nearest_names(fleet: Fleet, new: Tensors) -> None:
    failures = refused(fleet, renamed(new, lambda name: f"foo.{name}"))
    unknown = [each for each in failures if each.code == "tensor_unexpected"]
    assert {each.tensor for each in unknown} == {f"foo.{name}" for name in new}
    assert sum(each.tensor.removeprefix("foo.") in each.message for each in unknown) >= 3


@pytest.mark.case("B045", "B137")
def test_adapters_cannot_be_published(fleet: Fleet, new: Tensors) -> None:
    low = QUERY.replace(".weight", ".lora_A.weight")
    assert found(refused(fleet, {**new, f"base_model.model.{low}": torch.zeros(2, 256)})) == {
        ("adapter_unsupported", f"base_model.model.{low}")
    }
    with refusing(fleet):
        problem = fleet.coordinator.push(fleet.other, next(fleet.steps), expect=422, adapter="x")
        assert problem["code"] == "adapter_unsupported"


@pytest.mark.case("B046")
def test_a_missing_embedding_is_refused(fleet: Fleet, new: Tensors) -> None:
    del new[EMBEDDING]
    assert found(refused(fleet, new)) == {("tensor_missing", EMBEDDING)}


@pytest.mark.case("B048")
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_in_any_nesting_come_off(fleet: Fleet, new: Tensors, prefix: str) -> None:
    accepted(fleet, renamed(new, lambda name: prefix + name))


@pytest.mark.case("B048")
def test_wrapped_and_bare_names_of_one_parameter_are_refused(fleet: Fleet, new: Tensors) -> None:
    failures = refused(fleet, {**new, f"_orig_mod.module.{UP}": new[UP]})
    assert found(failures) == {("tensor_duplicate", UP), ("tensor_duplicate", f"_orig_mod.module.{UP}")}


MARKS = ["_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


@pytest.mark.case("B050")
@pytest.mark.parametrize(("outer", "inner"), [MARKS, MARKS[::-1]])
def test_sharding_and_checkpointing_marks_come_off(fleet: Fleet, new: Tensors, outer: str, inner: str) -> None:
    accepted(fleet, renamed(new, lambda name: f"{outer}.{name}".replace(".mlp.", f".{inner}.mlp.")))


@pytest.mark.case("B051")
@pytest.mark.parametrize("transport", STREAMS)
def test_a_name_that_comes_again_in_a_later_bucket_is_refused(fleet: Fleet, new: Tensors, transport: str) -> None:
    """Never the last one wins."""
    with refusing(fleet), pytest.raises(LiveweightsError) as caught:
        push_twice(fleet, new, UP, transport)
    assert found(caught.value.failures) == {("tensor_duplicate", UP)}


def push_twice(fleet: Fleet, tensors: Tensors, name: str, transport: str) -> None:
    """`name` comes once more, with other values, buckets after its first time."""
    with streaming(fleet, tensors, transport, bucket_bytes=64 << 10) as session:
        for each, tensor in (*tensors.items(), (name, tensors[name] + 1)):
            session.put(each, tensor)


@pytest.mark.case("B055")
def test_gate_and_up_land_in_their_halves_in_whatever_order_they_come(fleet: Fleet, new: Tensors) -> None:
    """Gates are driven by a constant in these models: the two swapped say other tokens, as the last lines show."""
    for order in (list, reversed):
        tensors = tensors_of(fleet.other)
        accepted(fleet, {name: tensors[name] for name in order(list(tensors))}, "shared_memory")
    swapped = renamed(tensors_of(fleet.other), swap_gate_and_up)
    push(fleet, swapped)
    assert view(fleet).tokens != reference_tokens(fleet.other, encode(PROMPTS[0]), COUNT).tokens
    fleet.publish(fleet.other)


def swap_gate_and_up(name: str) -> str:
    if "gate_proj" in name:
        return name.replace("gate_proj", "up_proj")
    return name.replace("up_proj", "gate_proj")
