"""A token that is exchanged while the fleet lives: at no step does one part refuse another."""

from __future__ import annotations

import pytest

from trainer_side.client.client import TOKEN_ENV, default_token
from updater.server.security import ADMIN_ENV, INFERENCE_ENV, Access, ConfigurationError, FrontKeys, Tokens, front_key

pytestmark = pytest.mark.case("F63")
OLD, NEW, OTHER = "old-token-1234", "new-token-1234", "other-token-1234"
URL = "http://127.0.0.1:8800"

#: docs/security.md, step by step: coordinator, two engines, clients.
ORDER = [
    (OLD, (OLD, OLD), OLD),
    (f"{OLD},{NEW}", (OLD, OLD), OLD),
    (f"{OLD},{NEW}", (f"{NEW},{OLD}", OLD), OLD),
    (f"{OLD},{NEW}", (f"{NEW},{OLD}", f"{NEW},{OLD}"), OLD),
    (f"{OLD},{NEW}", (f"{NEW},{OLD}", f"{NEW},{OLD}"), NEW),
    (NEW, (f"{NEW},{OLD}", f"{NEW},{OLD}"), NEW),
    (NEW, (NEW, f"{NEW},{OLD}"), NEW),
    (NEW, (NEW, NEW), NEW),
]


def tokens(text: str) -> Tokens:
    return Tokens.from_env({ADMIN_ENV: text})


def lets_in(access: Access, path: str, secret: str) -> bool:
    return access.refuses(path, [(b"authorization", f"Bearer {secret}".encode())]) is None


@pytest.mark.parametrize("step", range(len(ORDER)))
def test_no_step_of_the_order_refuses_anybody(step: int) -> None:
    coordinator, engines, client = ORDER[step]
    door = Access(tokens(coordinator), frozenset())
    assert lets_in(door, "/v1/updates", tokens(client).admin)
    for number, engine in enumerate(engines):
        assert lets_in(door, "/v1/fleet/replicas", tokens(engine).admin)
        keys = FrontKeys.of(tokens(engine), f"r{number}", URL)
        front = Access(tokens(engine), frozenset(), keys)
        assert lets_in(front, "/participant/v1/status", front_key(tokens(coordinator).admin, f"r{number}", URL))


def test_the_first_is_spoken_with_and_all_are_accepted() -> None:
    both = Tokens.from_env({ADMIN_ENV: f" {NEW} , {OLD},", INFERENCE_ENV: f"{OTHER},{OTHER}2"})
    assert (both.admin, both.inference) == (NEW, OTHER)
    door = Access(both, frozenset({"/v1/version"}))
    assert lets_in(door, "/v1/updates", OLD)
    assert lets_in(door, "/v1/version", f"{OTHER}2")
    assert not lets_in(door, "/v1/updates", f"{OTHER}2")
    for wrong in ("", OTHER + "3", f"{NEW},{OLD}"):
        assert not lets_in(door, "/v1/version", wrong)
    assert OLD not in repr(both)


def test_clients_speak_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, f"{NEW},{OLD}")
    assert default_token() == NEW


@pytest.mark.parametrize(
    "env", [{ADMIN_ENV: f"{NEW},short"}, {ADMIN_ENV: f"{NEW},{OLD}", INFERENCE_ENV: f"{OTHER},{OLD}"}]
)
def test_every_token_of_a_list_keeps_the_rules(env: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        Tokens.from_env(env)
