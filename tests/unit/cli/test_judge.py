"""The demo's judge: it must see every way in which a reply can be of more than one version."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from updater.demo.clients import ClientReply, Verdict, judge


@dataclass(frozen=True)
class Says:
    tokens: tuple[int, ...]
    margins: tuple[float, ...] = (9.0, 9.0, 9.0, 9.0)


EXPECTED = {"start": [Says((1, 2, 3, 4))], "0-1": [Says((5, 6, 7, 8))]}
GOOD = ClientReply("a", 0, (5, 6, 7, 8), "0-1", (("0-1", 0, 4),), "length")


def judged(*replies: ClientReply, expected: dict[str, list[Says]] = EXPECTED) -> Verdict:
    return judge(replies, expected, margin=1.0, max_tokens=4)


def test_a_reply_of_its_version_is_not_mixed() -> None:
    verdict = judged(GOOD, replace(GOOD, tokens=(1, 2, 3, 4), version="start", spans=(("start", 0, 4),)))
    assert (verdict.replies, len(verdict.mixed), verdict.compared, verdict.left_out) == (2, 0, 8, 0)


def test_an_aborted_reply_is_compared_as_far_as_it_goes() -> None:
    short = replace(GOOD, tokens=(5, 6), spans=(("0-1", 0, 2),), finish_reason="abort")
    empty = replace(GOOD, tokens=(), spans=(), finish_reason="abort")
    assert judged(short, empty).mixed == ()
    assert judged(short, empty).compared == 2


@pytest.mark.parametrize(
    "reply",
    [
        replace(GOOD, tokens=(5, 6, 3, 4)),  # the other version's tokens from the middle on
        replace(GOOD, tokens=(5, 6, 7, 9)),
        replace(GOOD, tokens=(1, 2, 3, 4)),  # all of another version
        replace(GOOD, version="0-2", spans=(("0-2", 0, 4),)),  # never published
        replace(GOOD, spans=(("start", 0, 2), ("0-1", 2, 4))),
        replace(GOOD, spans=(("start", 0, 4),)),
        replace(GOOD, spans=(("0-1", 0, 3),)),
        replace(GOOD, spans=()),
        replace(GOOD, tokens=(5, 6, 7), spans=(("0-1", 0, 3),)),  # too short for its finish reason
        replace(GOOD, tokens=(5, 6, 7, 8, 9), spans=(("0-1", 0, 5),)),
        replace(GOOD, finish_reason="error"),
        replace(GOOD, prompt=1),
    ],
)
def test_everything_else_is(reply: ClientReply) -> None:
    expected = {label: [*says, Says((9, 9, 9, 9))] for label, says in EXPECTED.items()}
    assert len(judged(reply, GOOD, expected=expected).mixed) == 1


def test_steps_from_the_first_thin_margin_on_are_left_out_and_counted() -> None:
    thin = {"0-1": [Says((5, 6, 7, 8), (9.0, 9.0, 0.5, 9.0))]}
    verdict = judged(replace(GOOD, tokens=(5, 6, 1, 1)), expected=thin)
    assert (len(verdict.mixed), verdict.compared, verdict.left_out) == (0, 2, 2)
    assert len(judged(replace(GOOD, tokens=(5, 1, 7, 8)), expected=thin).mixed) == 1
