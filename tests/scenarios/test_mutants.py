"""Every broken machine is found out by a story, a promise or a crash point, and the sound one by none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutants import MUTANTS, Mutant, machines
from stories import STORIES, tell

from updater.testing import Machines
from updater.testing.explorer import Explorer, Rates
from updater.testing.sweep import COORDINATOR, check_point, points

SEEDS = 30
#: One in so many mutants is part of `make check`; together they are slow.
SMOKE = 8


def tries(tested: Machines) -> Iterator[str]:
    """Play everything there is, the quick things first; a name for each thing before it is played."""
    for name in STORIES:
        yield name
        tell(name, tested)
    for seed in range(SEEDS):
        yield f"seed {seed}"
        Explorer(seed, Rates(), machines=tested, replicas=2 + seed % 2).run(200)
    for point in points("publish"):
        if point.role == COORDINATOR:
            yield str(point)
            check_point(point, tested)


def found_by(tested: Machines) -> str | None:
    """What notices that something is wrong, None if nothing does."""
    playing = ""
    try:
        for name in tries(tested):
            playing = name
    except Exception as problem:  # whatever it is: a sound machine raises nothing
        return f"{playing}: {problem!r}"
    return None


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name.replace(" ", "-"), marks=[] if n % SMOKE == 0 else pytest.mark.slow)
        for n, mutant in enumerate(MUTANTS)
    ],
)
def test_the_mutant_is_found_out(mutant: Mutant) -> None:
    with machines(mutant) as broken:
        assert found_by(broken) is not None


@pytest.mark.slow
def test_a_copy_without_a_change_is_sound() -> None:
    """The mutants are found for what they change, not for being copies."""
    with machines(None) as sound:
        assert found_by(sound) is None


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 15
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
