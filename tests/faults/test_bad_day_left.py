"""What a stock vLLM keeps in its temporary folder is told from what is ours."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from tests.faults.bad_day.left import of_vllm

UUID = "1218ff05-dbe8-417d-b12c-3a8b55bd3c9b"


@pytest.mark.parametrize("name", ["torchinductor_root", "vllm_dist_1f09b19e9dbd45a8bfbfd44e66a5b9c0"])
def test_what_vllm_makes_is_its_own(tmp_path: Path, name: str) -> None:
    assert of_vllm(tmp_path / name)


def test_a_socket_named_by_a_uuid_is_vllms_and_a_file_is_not() -> None:
    with tempfile.TemporaryDirectory() as short:  # an address of a socket has 107 bytes
        path = Path(short) / UUID
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            assert of_vllm(path)
        path.unlink()
        path.touch()
        assert not of_vllm(path)


@pytest.mark.parametrize("name", ["liveweights-ranks-ab12", f"liveweights-{UUID}", "vllm_dist_x", "tmpab12cd34"])
def test_what_is_ours_or_unknown_is_not(tmp_path: Path, name: str) -> None:
    assert not of_vllm(tmp_path / name)
