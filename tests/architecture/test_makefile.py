"""What the Makefile says of the processor: vLLM is tested with the kernels of AVX2, and in part without that cap."""

from __future__ import annotations

from pathlib import Path

import pytest

_LINES = Path(__file__).parents[2].joinpath("Makefile").read_text().splitlines()


@pytest.mark.case("F00")
def test_what_runs_vllm_is_capped_or_is_the_part_for_every_processor() -> None:
    assert "VLLM_CAPPED := ONEDNN_MAX_CPU_ISA=AVX2" in _LINES
    runs = [line for line in _LINES if "$(VLLM_PYTHON) -m" in line]
    uncapped = [line for line in runs if "$(VLLM_CAPPED)" not in line]
    assert len(runs) - len(uncapped) >= 3  # tests, soak, benchmark
    (short,) = uncapped
    assert "any_processor" in short
    assert "env -u ONEDNN_MAX_CPU_ISA" in short
