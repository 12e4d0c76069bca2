"""The digest of docs/digest.md once more, in plain Python on bytes: slow, and independent of the fast one."""

from __future__ import annotations

from itertools import product

M64 = 2**64 - 1


def odd(seed: int, index: int) -> int:
    z = (seed + index + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return ((z ^ (z >> 31)) & M64) | 1


def digest(data: bytes, shape: tuple[int, ...], item: int, start=None, size=None) -> int:
    """`data`: the whole tensor's bytes, row-major. Only elements inside the box (start, size) are present."""
    start = start if start is not None else (0,) * len(shape)
    size = size if size is not None else shape
    split = max(len(shape) - 1, 0)
    columns = shape[-1] if shape else 1
    if len(shape) >= 3:
        while columns < 64 and split > 0:
            split -= 1
            columns *= shape[split]
    words: dict[tuple[int, int], list[int]] = {}
    for index in product(*(range(a, a + n) for a, n in zip(start, size, strict=True))):
        flat = 0
        for at, extent in zip(index, shape, strict=True):
            flat = flat * extent + at
        row, column = divmod(flat, columns) if columns else (0, 0)
        chunk = data[flat * item : (flat + 1) * item]
        for offset in range(0, item, 4):
            piece = chunk[offset : offset + 4]
            byte = column * item + offset
            word = words.setdefault((row, byte // 4), [0, 0])
            word[0] |= int.from_bytes(piece, "little") << (8 * (byte % 4))
            word[1] += 1 << (8 * (byte % 4))
    total = 0
    for (row, column), (value, ones) in words.items():
        signed = value - 2**32 if value >= 2**31 else value
        factor = odd(0x4C57524F57530001, row) * odd(0x4C57434F4C530002, column)
        total += factor * (signed + 0x9E3779B97F4A7C15 * ones)
    return total & M64
