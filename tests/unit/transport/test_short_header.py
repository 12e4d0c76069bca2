"""The pure check of a header, called with any size of a file."""

from __future__ import annotations

import json

import pytest

from transports.disk.header import check_header
from updater.core.errors import Rejected

TENSOR = {"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


@pytest.mark.case("F43")
@pytest.mark.parametrize("entries", [{}, {"__metadata__": {}}, TENSOR])
def test_a_header_that_its_file_does_not_hold_is_refused_at_every_size(entries: dict[str, object]) -> None:
    raw = json.dumps(entries).encode()
    whole = 8 + len(raw) + (4 if "t" in entries else 0)
    for size in range(-1, whole):
        with pytest.raises(Rejected) as caught:
            check_header(raw, size, "f")
        assert caught.value.code == "file_truncated"
    check_header(raw, whole, "f")
