"""Mutated headers and index files: each is read or refused with a typed error, and nothing else happens.

`LIVEWEIGHTS_EXAMPLES=soak` runs more of them with a seed of the moment (`make soak`: two million). Whatever escapes is
printed as bytes, and belongs into `KEPT`.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress

import pytest
from mutations import mutated

from transports.disk.header import PREFIX, check_header
from transports.disk.index import parse_index
from updater.core.errors import LiveweightsError

SOAK = os.environ.get("LIVEWEIGHTS_EXAMPLES") == "soak"
COUNT = 50_000 if SOAK else 10_000
SEED = int(time.time()) if SOAK else 43

#: What once escaped, or nearly did.
KEPT = (
    b"{}",
    b'{"__metadata__":{}}',
    b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    b'{"t":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
    b'{"t":{"dtype":"F32","shape":[9223372036854775807,2],"data_offsets":[0,0]}}',
    b'{"t":{"dtype":"U8","shape":[1e400],"data_offsets":[0,1]}}',
    b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
    b'{"weight_map":{"t":"\\u0000"}}',
    b'{"weight_map":{"t":{}},"metadata":{"total_size":-1}}',
    b'{"weight_map":[],"metadata":[]}',
    b"[" * 5000,
    b'{"a":' * 5000,
    b'{"t":' + b"9" * 5000 + b"}",
)

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
    "d": {"dtype": "F8_E4M3", "shape": [0, 7], "data_offsets": [33, 33]},
}
INDEX = {
    "metadata": {"total_size": 33},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
}


def read(raw: bytes, size: int) -> None:
    """Both readers; a header may claim any size of its file. Raises what is not a typed refusal."""
    with suppress(LiveweightsError):
        header = check_header(raw, size, "f")
        taken = sum(tensor.stop - tensor.start for tensor in header.tensors)
        assert PREFIX + len(raw) + taken == size  # nothing is read that the file does not hold
        assert len({tensor.spec.name for tensor in header.tensors}) == len(header.tensors)
    with suppress(LiveweightsError):
        parse_index(raw.decode("utf-8", "surrogateescape"), "f")


@pytest.mark.case("F43")
def test_what_once_escaped_does_not() -> None:
    for raw in KEPT:
        for size in (0, PREFIX, PREFIX + len(raw), PREFIX + len(raw) + 4, 1 << 62):
            read(raw, size)


@pytest.mark.case("F43")
@pytest.mark.parametrize("document", [HEADER, INDEX], ids=["header", "index"])
def test_mutated_documents_are_read_or_refused(document: dict[str, object]) -> None:
    chance = random.Random(SEED)
    whole = json.dumps(document).encode()
    for _ in range(COUNT):
        raw = mutated(whole, chance)
        size = PREFIX + len(raw) + chance.choice((33, 33, 33, 0, chance.randint(-100, 100)))
        try:
            read(raw, size)
        except Exception as error:
            raise AssertionError(f"seed {SEED}: {raw!r} at {size} bytes") from error
