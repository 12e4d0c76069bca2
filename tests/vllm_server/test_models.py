"""Model families at TP=1 and TP=2: published, rolled back, and compared with engines that started on the same bytes.

At TP=1 an engine starts on the first checkpoint and is updated to the second, at TP=2 the other way round: each start
is the other's reference. At TP=1 the worker is the engine core's own process, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_adapter.models import encode, reference_tokens
from tests.vllm_server.fleet import IN_CORE, Fleet, coordinator, member
from tests.vllm_server.models import PROMPTS, SHAPES, Checkpoints
from tests.vllm_server.server import SOAKING

COUNT = 32
#: (model, dtype, version) -> what was seen of it: tokens and content digest, by how the engine came to it.
Seen = dict[tuple[str, str, str], tuple[list[tuple[int, ...]], str]]
# An engine takes most of a minute to start: here a model has several traits; `make soak` takes them apart.
# float32: vLLM packs linears, tied heads and experts, so that what is live is not the checkpoint's bytes.
CASES = [
    *((name, "bfloat16", ranks) for name in ("qwen2-tied", "odd", "mixtral") for ranks in (1, 2)),
    ("llama", "float32", 1),
    ("mixtral-tied", "float32", 2),
]
if SOAKING:
    CASES = [(name, dtype, ranks) for name in SHAPES for dtype in ("bfloat16", "float32") for ranks in (1, 2)]


@pytest.fixture(scope="module")
def seen() -> Seen:
    return {}


def look(fleet: Fleet) -> tuple[list[tuple[int, ...]], str]:
    """Tokens of every prompt, and the digest of what is live."""
    tokens = [fleet.server.complete(prompt, COUNT).tokens for prompt in PROMPTS]
    return tokens, fleet.coordinator.get("/v1/fleet")["members"][0]["live_digest"]


def same(found: tuple[list[tuple[int, ...]], str], seen: Seen, key: tuple[str, str, str], path: Path) -> bool:
    """As transformers says, and as every engine did that held these bytes before."""
    expected = [reference_tokens(path, encode(prompt), COUNT).tokens for prompt in PROMPTS]
    return found[0] == expected and found == seen.setdefault(key, found)


#: The one whose start is run with the kernels of every processor.
ANY_PROCESSOR = ("qwen2-tied", "bfloat16", 1)


@pytest.mark.case("F00")
@pytest.mark.parametrize(
    ("name", "dtype", "ranks"),
    [pytest.param(*case, marks=pytest.mark.any_processor if case == ANY_PROCESSOR else ()) for case in CASES],
    ids=lambda value: str(value),
)
def test_commit_and_rollback_give_the_tokens_of_engines_that_started_so(
    checkpoints: Callable[..., Checkpoints], tmp_path: Path, seen: Seen, name: str, dtype: str, ranks: int
) -> None:
    models = checkpoints(name, dtype)
    versions = {"first": models.first, "second": models.second}
    start, other = ("first", "second") if ranks == 1 else ("second", "first")
    roots = [models.first.parent]
    with coordinator(tmp_path / "coordinator", roots) as at:
        log = tmp_path / "server.log"
        where = IN_CORE if ranks == 1 else {}
        with member(versions[start], log, at, roots=roots, ranks=ranks, dtype=dtype, **where) as server:
            fleet = Fleet(at, server, models.first, models.second, versions[start])
            names = {process.pid: process.name() for process in server.processes()}
            (held,) = at.get("/v1/fleet")["members"]
            in_core = [names[rank["pid"]].startswith("VLLM::EngineCor") for rank in held["ranks"]]
            assert in_core == [ranks == 1] * ranks
            assert same(look(fleet), seen, (name, dtype, start), versions[start])
            receipt = fleet.publish(versions[other])
            assert (receipt["install"], receipt["tensors_changed"] > 0) == ("flip", True)
            assert same(look(fleet), seen, (name, dtype, other), versions[other])
            back = at.rollback("start", receipt["version"])
            assert back["outcome"] == "committed"
            assert same(look(fleet), seen, (name, dtype, start), versions[start])
