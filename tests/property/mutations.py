"""Random edits of JSON documents, for fuzzers that keep a seed."""

from __future__ import annotations

import random

#: What parsers trip over.
ODD = (
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"9" * 30,
    b'""',
    b"[]",
    b"{}",
    b"NaN",
    b"\\u0000",
    b"\xff",
    b"\\ud800",
    b"../x",
)


def mutated(raw: bytes, random: random.Random) -> bytes:
    """A few edits at random places: bits, cuts, copies, and words that parsers trip over."""
    text = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at, to = sorted((random.randint(0, len(text)), random.randint(0, len(text))))
        match random.randrange(6):
            case 0 if text:
                text[random.randrange(len(text))] ^= 1 << random.randrange(8)
            case 1:
                del text[at : min(to, at + random.randint(1, 20))]
            case 2:
                text[at:at] = text[at:to][:60]
            case 3:
                text[at:to] = random.choice(ODD)
            case 4:
                text[at:at] = random.choice(ODD)
            case 5:
                text[at : at + 1] = bytes([random.randrange(256)])
    return bytes(text)
