"""What a rank says of configs, and what its front makes of that: a real engine in this process, over real messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.base import EngineSpec
from engine_adapter.rank.messages import RankHello, RankPlan, RankPlanReply, hello_of, running_document
from engine_adapter.rank.plan import CancelToken, make_plan
from engine_adapter.rank.staging import blank_sources
from engine_adapter.replica.agreement import check_config
from engine_adapter.testing import build_toy
from engine_adapter.testing.toy.checkpoint import make_toy_checkpoint
from engine_adapter.testing.toy.engine import ToyEngine
from engine_adapter.vllm.configs import ServerConfig
from transports.disk.hashes import folder_document
from transports.disk.manifests import build_manifest, write_manifest
from transports.disk.source import DiskSource
from updater.core.errors import Failure, LiveweightsError
from updater.core.participant import Compared, DiskOffer, Fence, Kind, PlanRequest
from updater.core.policy import CachePolicy, InFlight, InstallMode
from updater.protocol import wire
from updater.protocol.manifest import FILE_NAME
from updater.protocol.model_config import differences


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy") / "start", seed=1)


@pytest.fixture(scope="module")
def engine(start: Path) -> ToyEngine:
    return build_toy(EngineSpec(0, 1, str(start), str(start.parent / "meet"), {}))


@pytest.fixture
def hello(engine: ToyEngine, start: Path) -> RankHello:
    made = hello_of(engine, EngineSpec(0, 1, str(start), "", {}))
    return wire.decode(RankHello, wire.encode(made))


def folder(start: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(start, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def planned(engine: ToyEngine, path: Path, **changes: Any) -> RankPlanReply:
    request = RankPlan(1, DiskOffer(str(path)), (str(path.parent),), "", **changes)
    live = {name: parameter.local for name, parameter in engine.parameters().items()}
    plan = make_plan(engine, live, request, lambda *_: DiskSource.open(str(path), (str(path.parent),)))
    plan.close()
    return wire.decode(RankPlanReply, wire.encode(plan.reply))


@pytest.mark.case("F05")
def test_a_rank_that_looks_for_blank_tensors_can_be_stopped(engine: ToyEngine, start: Path) -> None:
    live = {name: parameter.local for name, parameter in engine.parameters().items()}
    request = RankPlan(1, DiskOffer(str(start)), (str(start.parent),), "")
    plan = make_plan(engine, live, request, lambda *_: DiskSource.open(str(start), (str(start.parent),)))
    try:
        assert blank_sources(plan, live, live, CancelToken(lambda: False, 1.0, lambda: 0.0)) == ()
        for stop, code in ((CancelToken(lambda: True, 1.0, lambda: 0.0), "client_abort"),
                           (CancelToken(lambda: False, 1.0, lambda: 2.0), "phase_timeout")):  # fmt: skip
            with pytest.raises(LiveweightsError) as caught:
                blank_sources(plan, live, live, stop)
            assert caught.value.code == code
    finally:
        plan.close()


def checked(engine: ToyEngine, hello: RankHello, path: Path, **policy: Any) -> tuple[tuple[str, ...], Compared]:
    request = PlanRequest(
        fence=Fence("f", 1, 1, 0, "i"), kind=Kind.UPDATE, update="u", version="0-1", offer=DiskOffer(str(path)),
        manifest="", digest="", in_flight=InFlight.DRAIN, cache=CachePolicy.RESET, install=InstallMode.AUTO,
        require_digests=False, allow_narrowing=(), allow_nonfinite=False, **policy,
    )  # fmt: skip
    return check_config(planned(engine, path).model, (hello,), request)


def refused(engine: ToyEngine, hello: RankHello, path: Path, **policy: Any) -> list[Failure]:
    with pytest.raises(LiveweightsError) as caught:
        checked(engine, hello, path, **policy)
    return list(caught.value.failures)


@pytest.mark.case("F01")
@pytest.mark.parametrize("manifest", [False, True])
def test_another_config_is_refused_by_key(
    engine: ToyEngine, hello: RankHello, start: Path, tmp_path: Path, manifest: bool
) -> None:
    path = folder(start, tmp_path / "other", rope_theta=37.0, rms_norm_eps=0.5)
    if manifest:
        write_manifest(str(path))
    found = refused(engine, hello, path)
    assert {failure.code for failure in found} == {"config_mismatch"}
    assert {failure.message.split(" ")[0] for failure in found} == {"rms_norm_eps", "rope_parameters.rope_theta"}
    assert len(refused(engine, hello, path, allow_config=("rope_theta",))) == 1
    warnings, compared = checked(engine, hello, path, allow_config=("rope_theta", "rms_norm_eps"))
    assert len(warnings) == 2
    assert compared == Compared("engine", "none", "engine")


@pytest.mark.case("F01", "F02")
def test_another_save_of_the_same_model_is_the_same(
    engine: ToyEngine, hello: RankHello, start: Path, tmp_path: Path
) -> None:
    path = folder(start, tmp_path / "anew", transformers_version="9", torch_dtype="float16", use_cache=False)
    assert checked(engine, hello, path, require_config=True) == ((), Compared("engine", "none", "engine"))
    again = hello_of(engine, EngineSpec(0, 1, str(path), "", {}))
    assert again.config_hash == hello.config_hash
    config = json.loads((path / "config.json").read_text())
    del config["rms_norm_eps"]  # the class fills it in
    (path / "config.json").write_text(json.dumps(config))
    assert checked(engine, hello, path) == ((), Compared("engine", "none", "engine"))


@pytest.mark.case("F01")
def test_a_source_without_config_is_not_compared(
    engine: ToyEngine, hello: RankHello, start: Path, tmp_path: Path
) -> None:
    path = folder(start, tmp_path / "bare")
    (path / "config.json").unlink()
    assert checked(engine, hello, path) == ((), Compared())
    assert [failure.code for failure in refused(engine, hello, path, require_config=True)] == ["config_required"]
    assert planned(engine, start, known=True).model is None


@pytest.mark.case("F01")
def test_a_manifest_carries_the_config_where_its_file_is_gone(
    engine: ToyEngine, hello: RankHello, start: Path, tmp_path: Path
) -> None:
    path = folder(start, tmp_path / "carried", rope_theta=37.0)
    write_manifest(str(path))
    assert json.loads((path / FILE_NAME).read_text())["model"]["config"]["rope_theta"] == 37
    (path / "config.json").unlink()
    assert [failure.code for failure in refused(engine, hello, path)] == ["config_mismatch"]
    assert build_manifest(str(path)).model is None


@pytest.mark.case("F65")
@pytest.mark.parametrize("text", ["{", '{"x": ' + "[" * 5000 + "]" * 5000 + "}", json.dumps({"x": "y" * 100_000})])
def test_a_config_that_cannot_be_compared_is_refused(engine: ToyEngine, start: Path, tmp_path: Path, text: str) -> None:
    path = folder(start, tmp_path / "odd")
    (path / "config.json").write_text(text)
    with pytest.raises(LiveweightsError) as caught:
        planned(engine, path)
    assert [(failure.code, failure.file) for failure in caught.value.failures] == [("config_mismatch", "config.json")]


class Config:
    """As `PretrainedConfig`: a class that fills in what a config leaves out, and reads rotary positions from
    `rope_parameters` alone once it has them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {"head_dim": 4, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        values.get("rope_parameters", {}).setdefault("rope_theta", 10000.0)  # as transformers does: in place
        return cls(values)

    @classmethod
    def get_config_dict(cls, path: str, **_options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return json.loads((Path(path) / "config.json").read_text()), {}

    def to_dict(self) -> dict[str, Any]:
        return self.values


def server(start: Path, overrides: Any = None, runs: Mapping[str, Any] | None = None, **more: Any) -> ServerConfig:
    """Of a vLLM server started on `start`. `runs`: what its config class made of it all."""
    read = json.loads((start / "config.json").read_text())
    config = Config({**read, **(runs or {})})
    said = {"model": str(start), "hf_overrides": overrides or {}, "hf_config": config, **more}
    return ServerConfig(SimpleNamespace(**said))


ROPE = {"rope_theta": 100.0, "rope_type": "default"}


@pytest.mark.case("F01", "F64")
@pytest.mark.parametrize(
    ("overrides", "runs", "expected"),
    [
        ({"rms_norm_eps": 0.5}, {"rms_norm_eps": 0.5}, {"rms_norm_eps": "0.5"}),
        # Told and not done, told as a whole object, told in an older spelling.
        ({"rope_theta": 37.0}, {"rope_parameters": ROPE, "rope_theta": 37.0}, {}),
        ({"rope_parameters": ROPE | {"rope_theta": 37.0}}, {"rope_parameters": ROPE | {"rope_theta": 37.0}},
         {"rope_parameters.rope_theta": "37"}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
         {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
         {"rope_parameters.rope_type": '"linear"', "rope_parameters.factor": "2"}),
        # A function may change anything.
        (lambda config: config, {"rms_norm_eps": 0.5, "head_dim": 8}, {"rms_norm_eps": "0.5", "head_dim": "8"}),
    ],
    ids=["plain", "no effect", "object", "older spelling", "function"],
)  # fmt: skip
def test_what_vllm_made_of_its_overrides_is_what_it_runs_on(
    start: Path, tmp_path: Path, overrides: Any, runs: dict[str, Any], expected: dict[str, str]
) -> None:
    path = folder(start, tmp_path / "started", rope_parameters=ROPE)
    plain, told = (running_document(str(path), knows) for knows in (server(path), server(path, overrides, runs)))
    assert plain.config is not None
    assert told.config is not None
    found = differences(told.config, plain.config, told.completed, plain.completed)
    assert {difference.key: difference.theirs for difference in found} == expected


@pytest.mark.case("F01", "F64")
def test_a_document_is_what_the_files_say_whatever_a_config_class_does_to_what_it_is_handed(
    start: Path, tmp_path: Path
) -> None:
    path = folder(start, tmp_path / "started", rope_parameters={"rope_type": "default"})
    found = running_document(str(path), server(path))
    found.check()
    assert found.config is not None
    assert found.config["rope_parameters"] == {"rope_type": "default"}
    assert found.completed is not None
    assert found.completed["rope_parameters"]["rope_theta"] == 10000


@pytest.mark.case("F01", "F64")
def test_parts_of_a_config_are_looked_at_by_themselves(start: Path, tmp_path: Path) -> None:
    path = folder(start, tmp_path / "nested", text_config={"rms_norm_eps": 1e-6, "head_dim": 4}, extra={"a": 1, "b": 2})
    overrides = {"text_config": {"rms_norm_eps": 0.5}, "extra": {"b": 3}}
    runs = {"text_config": {"rms_norm_eps": 0.5, "head_dim": 4, "filled_in": 7}, "extra": {"b": 3}}
    knows = server(path, overrides, runs)
    knows.model_config.hf_config.text_config = Config(runs["text_config"])
    found = running_document(str(path), knows).config
    assert found is not None
    assert found["text_config"] == {"rms_norm_eps": 0.5, "head_dim": 4}  # and not what the class fills in
    assert found["extra"] == {"b": 3}  # replaced, as vLLM does with what is no config


@pytest.mark.case("F01", "F64")
def test_a_config_and_a_tokenizer_of_other_folders_are_those_that_count(start: Path, tmp_path: Path) -> None:
    other = folder(start, tmp_path / "other", rms_norm_eps=0.5, quantization_config={"bits": 4})
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    found = running_document(str(start), server(start, hf_config_path=str(other), tokenizer=str(other)))
    read = folder_document(str(other), ("/",))
    assert read.tokenizer is not None
    assert (found.config, found.quantization, found.tokenizer) == (read.config, read.quantization, read.tokenizer)
    same = running_document(str(start), server(start, hf_config_path=str(start), tokenizer=str(start)))
    assert same == running_document(str(start), server(start))


@pytest.mark.case("F65")
@pytest.mark.parametrize("value", ["x" * 100_000, object()], ids=["large", "no JSON"])
def test_overrides_that_cannot_be_compared_are_refused(start: Path, value: object) -> None:
    with pytest.raises(LiveweightsError) as caught:
        running_document(str(start), server(start, {"hidden_act": value}, {"hidden_act": value}))
    assert caught.value.code == "config_mismatch"
