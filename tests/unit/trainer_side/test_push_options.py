"""One list of what a push takes, whichever way it is called."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import trainer_side
from trainer_side import Pusher, push, push_async
from trainer_side.client.request import REQUEST_DEFAULTS, PushRequest, RequestOptions
from trainer_side.publishing.background import Background
from trainer_side.publishing.options import PUSHER_DEFAULTS, PusherOptions, PushOptions, parted
from trainer_side.testing import RECEIPT, FakeCoordinator
from updater.core.errors import Rejected
from updater.core.policy import Policy, SourceLayout
from updater.protocol.answers import Receipt


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as running:
        yield running


@pytest.mark.parametrize(("kind", "defaults"), [(PusherOptions, PUSHER_DEFAULTS), (RequestOptions, REQUEST_DEFAULTS)])
def test_every_option_has_a_default(kind: Any, defaults: Any) -> None:
    assert list(get_type_hints(kind)) == list(defaults)


def test_no_name_is_both_the_pushers_and_the_pushs() -> None:
    assert not set(get_type_hints(PusherOptions)) & set(get_type_hints(RequestOptions))
    assert set(get_type_hints(PushOptions)) == set(get_type_hints(PusherOptions)) | set(get_type_hints(RequestOptions))
    assert parted({"keep": 1, "id": "x"}) == ({"keep": 1}, {"id": "x"})


#: What callers have written so far; nothing of it may be lost.
OF_PUSHER = {
    "transport": "auto",
    "directory": None,
    "config_from": None,
    "keep": 2,
    "shard_bytes": 4 << 30,
    "dtypes": None,
    "bucket_bytes": 512 << 20,
    "stall_s": 30.0,
    "sender_options": None,
}
OF_PUSH = {
    "policy": None,
    "allow_suspicious": (),
    "allow_config": (),
    "layouts": None,
    "hooks": None,
    "id": None,
    "base_version": None,
    "lease_s": None,
    "timeout_s": 1800.0,
}


def test_the_defaults_are_what_they_were() -> None:
    assert PUSHER_DEFAULTS == OF_PUSHER
    assert {name: value for name, value in REQUEST_DEFAULTS.items() if name != "progress"} == OF_PUSH


def test_every_option_is_taken_wherever_it_was_taken(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    told: list[int] = []
    of_pusher = OF_PUSHER | {"directory": tmp_path, "transport": "disk"}
    of_push = OF_PUSH | {"id": "mine", "progress": told.append}
    weights = {"w": torch.ones(4)}
    with Pusher(coordinator.url, "", **of_pusher) as pusher:  # type: ignore[arg-type]
        assert pusher.push(weights, 7, **of_push).outcome == "committed"  # type: ignore[arg-type]
    assert push(weights, 7, url=coordinator.url, token="", **of_pusher, **of_push).version == "0-7"  # type: ignore[arg-type]
    assert [body["id"] for body in coordinator.bodies] == ["mine", "mine"]
    assert sum(told) == 2 * 16


@pytest.mark.case("F05")
def test_what_is_allowed_is_part_of_the_policy(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    for policy in (None, {"in_flight": "abort"}, Policy(allow_suspicious=("a.*",))):
        push(tmp_path, 7, url=coordinator.url, token="", policy=policy, allow_suspicious=["*.bias"])
    assert [body["policy"] for body in coordinator.bodies] == [
        {"allow_suspicious": ["*.bias"]},
        {"in_flight": "abort", "allow_suspicious": ["*.bias"]},
        {"allow_suspicious": ["a.*", "*.bias"]},
    ]


@pytest.mark.case("F04")
def test_what_is_said_of_layouts_is_part_of_the_policy(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    said = Policy(layouts=(("a", SourceLayout.STACKED), ("b", SourceLayout.INTERLEAVED)))
    for policy in (None, {"layouts": {"a": "stacked", "b": "interleaved"}}, said):
        push(tmp_path, 7, url=coordinator.url, token="", policy=policy, layouts={"b": SourceLayout.BY_KV_HEAD})
    first, *rest = [list(body["policy"]["layouts"].items()) for body in coordinator.bodies]
    assert first == [("b", "by_kv_head")]
    assert rest == [[("b", "by_kv_head"), ("a", "stacked")]] * 2


@pytest.mark.case("F01")
def test_keys_that_may_differ_are_part_of_the_policy(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    push(tmp_path, 7, url=coordinator.url, token="", policy={"allow_config": ["a"]}, allow_config=["rope_theta", "a"])
    assert [body["policy"] for body in coordinator.bodies] == [{"allow_config": ["a", "rope_theta"]}]


@pytest.mark.parametrize("call", [Pusher, lambda **more: push({}, 7, **more), lambda **more: push_async({}, 7, **more)])
def test_a_name_that_nothing_takes_is_refused(call: Any, coordinator: FakeCoordinator) -> None:
    with pytest.raises(TypeError):
        call(url=coordinator.url, directry="misspelt")
    with Pusher(coordinator.url) as pusher, pytest.raises(TypeError):
        pusher.push({}, 7, polcy={})  # type: ignore[call-arg]
    assert coordinator.paths == []


def test_a_version_that_is_none_is_refused_where_it_is_named() -> None:
    with pytest.raises(Rejected) as caught:
        PushRequest.of("v7")
    assert caught.value.code == "bad_request"


def test_the_public_calls_show_every_keyword() -> None:
    def shown(call: Any) -> dict[str, Any]:
        return {name: each.default for name, each in inspect.signature(call).parameters.items()}

    first, addresses = {"weights": inspect.Parameter.empty, "version": inspect.Parameter.empty}, {"url": None}
    everything = {**first, **addresses, "token": None, **PUSHER_DEFAULTS, **REQUEST_DEFAULTS}
    assert shown(push) == shown(push_async) == everything
    assert shown(Pusher) == {**addresses, "token": None, "link": None, **PUSHER_DEFAULTS}
    assert (
        shown(Pusher.push) == shown(Pusher.push_async) == {"self": inspect.Parameter.empty, **first, **REQUEST_DEFAULTS}
    )


def test_what_was_begun_in_the_background_comes_before_the_next_push() -> None:
    """On every rank: else one of them would be in the second push while another one is in the first."""
    background, waiting, order = Background(), threading.Event(), []

    def rest() -> Receipt:
        assert waiting.wait(60)
        order.append("first")
        return Receipt.model_validate(RECEIPT)

    def second() -> None:
        waiting.set()
        background.settle()
        order.append("second")

    background.begin(rest)
    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    background.close()
    assert order == ["first", "second"]


@pytest.mark.case("F26")
def test_a_step_may_be_a_text_as_on_the_command_line() -> None:
    assert PushRequest.of("7").version == 7
    assert PushRequest.of("2-7").version == "2-7"


def test_the_package_lists_its_names_before_they_are_loaded() -> None:
    assert set(dir(trainer_side)) == set(trainer_side.__all__)
    assert all(getattr(trainer_side, name) is not None for name in dir(trainer_side))
