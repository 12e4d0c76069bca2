"""The pause of one rank, with a loop that is a thread of the test."""

from __future__ import annotations

import threading

import pytest

from engine_adapter.transformers.batching import PauseStatus, RequestState, pack, unpack

HANG_S = 20.0


class Loop:
    """Parks once when told to, like the generation loop when its rank group says pause."""

    def __init__(self, status: PauseStatus) -> None:
        self.status = status
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._park)

    def park(self) -> Loop:
        self._thread.start()
        return self

    def _park(self) -> None:
        self.status.pause_and_wait()
        self.done.set()

    def join(self) -> bool:
        self._thread.join(HANG_S)
        return self.done.is_set()


def test_a_pause_holds_the_loop_until_it_is_released() -> None:
    status, wake = PauseStatus(HANG_S), threading.Event()
    loop = Loop(status).park()
    status.acquire_within(wake, HANG_S)
    assert wake.is_set()
    assert not loop.done.is_set()
    status.release(held=True)
    assert loop.join()
    assert not status.is_pause_requested()


def test_a_pause_that_does_not_come_is_withdrawn() -> None:
    status = PauseStatus(HANG_S)
    with pytest.raises(TimeoutError):
        status.acquire_within(threading.Event(), 0.0)
    assert not status.is_pause_requested()


@pytest.mark.parametrize("crashed", [False, True])
def test_a_loop_that_is_gone_is_not_paused(crashed: bool) -> None:
    status = PauseStatus(HANG_S)
    if crashed:
        status.record_fatal_error(ValueError())
    else:
        status.mark_as_stopped()
    with pytest.raises(RuntimeError):
        status.acquire_within(threading.Event(), HANG_S)
    assert not status.is_pause_requested()


def test_a_loop_that_nobody_here_asked_goes_on_after_its_grace() -> None:
    status = PauseStatus(0.0)
    assert Loop(status).park().join()
    assert not status.is_pause_requested()


def test_a_release_without_a_pause_ends_that_wait_early() -> None:
    status = PauseStatus(10 * HANG_S)
    loop = Loop(status)
    parked = threading.Event()

    def release_when_parked() -> None:
        with status._condition:
            status._condition.wait_for(lambda: status._paused, timeout=HANG_S)
        parked.set()
        status.release(held=False)

    other = threading.Thread(target=release_when_parked)
    other.start()
    assert loop.park().join()
    other.join(HANG_S)
    assert parked.is_set()


def test_a_release_without_a_pause_does_not_end_somebody_elses() -> None:
    status = PauseStatus(HANG_S)
    loop = Loop(status).park()
    status.acquire_within(threading.Event(), HANG_S)
    status.release(held=False)
    assert status._paused
    assert not loop.done.is_set()
    status.release(held=True)
    assert loop.join()


def test_requests_travel_as_json_and_arrive_equal() -> None:
    states = [
        RequestState("a", [1, 2, 3], max_new_tokens=4, eos_token_id=[7, 9], streaming=True),
        RequestState("b", [5], max_new_tokens=1, eos_token_id=[], logit_processor_kwargs={"temperature": 0.5}),
    ]
    data = pack(states, ["c", "d"])
    arrived, cancelled = unpack(data)
    assert cancelled == ["c", "d"]
    for mine, theirs in zip(states, arrived, strict=True):
        for name in ("request_id", "initial_tokens", "max_new_tokens", "streaming", "logit_processor_kwargs"):
            assert getattr(theirs, name) == getattr(mine, name)
        assert theirs._eos_token_ids == mine._eos_token_ids
        assert theirs.remaining_prefill_tokens == mine.remaining_prefill_tokens
    assert data[:1] == b"{"
