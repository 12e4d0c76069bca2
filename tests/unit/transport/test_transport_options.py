"""What a sender is made with: an option that is none, a value that is none, and an address where it cannot listen."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from transports.broadcast import BroadcastSender
from transports.registry import make_sender
from transports.shared_memory import SharedMemorySender
from transports.testing import refused

KINDS = ("broadcast", "shared_memory", "cuda_ipc")


@pytest.mark.case("B200")
@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_option_is_refused_with_those_that_there_are(kind: str) -> None:
    with refused("bad_request") as caught:
        make_sender(kind, patience=3.0)
    (failure,) = caught[0].failures
    assert {"patience_s", "digests"} <= set(failure.hint.replace(",", "").split())


@pytest.mark.case("B200")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"patience_s": value}) for kind in KINDS for value in ("3", -1.0, 0.0, float("nan"), None)),
        *((kind, {"digests": "yes"}) for kind in KINDS),
        *(("broadcast", {"port": value}) for value in ("80", -1, 1 << 16, None)),
        *(("broadcast", {"host": value}) for value in (5, None)),
        ("broadcast", {"advertise": None}),
        ("broadcast", {"backend": "carrier pigeon"}),
        ("broadcast", {"backend": ["gloo"]}),
        *((kind, {"folder": 5}) for kind in KINDS[1:]),
        ("cuda_ipc", {"device": 1.5}),
    ],
)
def test_a_value_of_no_sense_is_refused(kind: str, options: dict[str, Any]) -> None:
    with refused("bad_request"):
        make_sender(kind, **options)


@pytest.mark.case("B200")
def test_a_port_in_use_is_refused_with_what_to_choose() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with refused("transport_unsupported") as caught:
            make_sender("broadcast", port=taken.getsockname()[1])
    (failure,) = caught[0].failures
    assert "port" in failure.hint.replace(",", "").split()


@pytest.mark.case("B200")
@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no host", "h" * 300, "a..b"])
def test_a_host_that_is_not_of_this_machine_is_refused(host: str) -> None:
    with refused("transport_unsupported"):
        BroadcastSender(host).close()


@pytest.mark.case("B200")
@pytest.mark.parametrize("folder", ["none", "x" * 200, "nul\0"])
def test_a_folder_that_takes_no_socket_is_refused(tmp_path: Path, folder: str) -> None:
    with refused("transport_unsupported"):
        SharedMemorySender(folder=str(tmp_path / folder)).close()


def test_options_as_they_are_documented_are_taken() -> None:
    make_sender("broadcast", host="127.0.0.1", port=0, advertise="trainer", backend="gloo", patience_s=5).close()
    make_sender("shared_memory", patience_s=float("inf"), digests=True, folder=None).close()
