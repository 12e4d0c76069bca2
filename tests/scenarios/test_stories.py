"""Golden transcripts: one readable text per failure story.

`LIVEWEIGHTS_REGENERATE=1 pytest tests/scenarios` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stories import STORIES, tell

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(story, "pytestmark", ())) for name, story in STORIES.items()]
)
def test_story(name: str) -> None:
    sim = tell(name)
    title = " ".join((STORIES[name].__doc__ or "").split())
    text = "\n".join([f"# {name.replace('_', ' ')}", *([f"# {title}"] if title else []), *sim.log]) + "\n"
    golden = HERE / f"{name}.txt"
    if os.environ.get("LIVEWEIGHTS_REGENERATE"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_transcript_has_its_story() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(STORIES)
