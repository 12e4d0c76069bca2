"""The conformance suite of a transport: subclass it in a test module, supply three methods, and be green.

`TransportContract` is what every transport must do, and reads each source once. `StoredContract` adds what a source
that lies somewhere must do when it is read again. Streams have `transports.testing.stream_contract.StreamContract`.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from transports.base import Box, Cancelled, Read, Source
from transports.digest import tensor_digest
from transports.dtypes import DTYPE_NAMES, TORCH_DTYPES, itemsize
from updater.core.errors import LiveweightsError

#: What can happen to bytes on the way. The suite asks `damage` for each.
DAMAGE = ("drop", "duplicate", "truncate", "flip", "stale", "oversize")


class TransportContract:
    """`send` makes `tensors` available under `folder`, `connect` opens what is there, `damage` breaks it.

    Test functions need pytest's `tmp_path` and nothing else.
    """

    #: Kinds of damage after which the bytes may arrive, and then have another digest. The others must be refused.
    differs: tuple[str, ...] = ("flip",)

    def send(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def connect(self, folder: Path) -> Source:
        """With every buffer that is used more than once overwritten after use."""
        raise NotImplementedError

    def damage(self, folder: Path, kind: str, name: str) -> None:
        """Do one of `DAMAGE` to tensor `name`, which is neither the first nor the last; before `connect`, or after
        it for `stale`, which puts other values there.
        """
        raise NotImplementedError

    def test_what_is_sent_arrives(self, tmp_path: Path) -> None:
        """B105: equal digests of every dtype, of a scalar, of an empty tensor."""
        tensors = samples()
        source = self._opened(tmp_path, tensors)
        arrived = fetch(source)
        assert digests(arrived) == digests(tensors)
        source.close()

    def test_specs_say_what_was_sent(self, tmp_path: Path) -> None:
        tensors = samples()
        source = self._opened(tmp_path, tensors)
        found = {name: (spec.dtype, spec.shape) for name, spec in source.specs.items()}
        assert found == {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        source.close()

    def test_regions_reassemble(self, tmp_path: Path) -> None:
        """Quarters into one buffer, each through its own strided view."""
        tensor = noise("BF16", (37, 53), 1)
        source = self._opened(tmp_path, {"t": tensor})
        arrived = torch.empty_like(tensor)
        boxes = [Box((r, c), (h, w)) for r, h in ((0, 18), (18, 19)) for c, w in ((0, 27), (27, 26))]
        source.read([Read("t", box, arrived[box.slices()]) for box in boxes])
        assert tensor_digest(arrived) == tensor_digest(tensor)
        source.close()

    def test_a_permuted_target(self, tmp_path: Path) -> None:
        tensor = noise("F32", (5, 6, 7), 2)
        source = self._opened(tmp_path, {"t": tensor})
        arrived = torch.empty(7, 5, 6)
        source.read([Read("t", Box.whole(tensor.shape), arrived, (2, 0, 1))])
        assert tensor_digest(arrived) == tensor_digest(tensor.permute(2, 0, 1))
        source.close()

    def test_a_target_of_another_dtype(self, tmp_path: Path) -> None:
        tensor = noise("BF16", (40, 8), 3).nan_to_num()
        source = self._opened(tmp_path, {"t": tensor})
        arrived = torch.empty(40, 8, dtype=torch.float32)
        source.read([Read("t", Box.whole(tensor.shape), arrived)])
        assert torch.equal(arrived, tensor.float())
        source.close()

    def test_fused_from_a_reused_buffer(self, tmp_path: Path) -> None:
        """B033: parts delivered one after the other stay what they were."""
        parts = {name: noise("BF16", (8, 16), at) for at, name in enumerate(("q", "k", "v"))}
        source = self._opened(tmp_path, parts)
        fused = torch.empty(24, 16, dtype=torch.bfloat16)
        box = Box.whole((8, 16))
        source.read([Read(name, box, fused[at * 8 : at * 8 + 8]) for at, name in enumerate(parts)])
        assert tensor_digest(fused) == tensor_digest(torch.cat(list(parts.values())))
        source.close()

    def test_bytes_are_counted(self, tmp_path: Path) -> None:
        tensors = samples()
        source = self._opened(tmp_path, tensors)
        seen: list[int] = []
        targets = blank(source)
        report = source.read([Read(name, Box.whole(t.shape), t) for name, t in targets.items()], progress=seen.append)
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        assert report.bytes_delivered == total
        assert sum(seen) == report.bytes_asked >= total
        source.close()

    def test_what_cannot_be_read_is_refused_before_a_byte_is_written(self, tmp_path: Path) -> None:
        target = torch.full((4, 4), 7.0)
        good = Read("t", Box.whole((4, 4)), target)
        for at, (bad, code) in enumerate(
            (
                (Read("absent", Box.whole((4, 4)), target), "tensor_missing"),
                (Read("t", Box((1, 0), (4, 4)), target), "tensor_shape"),
                (Read("t", Box((0, 0), (2, 4)), target), "tensor_shape"),
            )
        ):
            folder = tmp_path / str(at)
            folder.mkdir()
            source = self._opened(folder, {"t": noise("F32", (4, 4), 1)})
            assert self._code(source, [good, bad]) == code
            source.close()
        assert bool((target == 7.0).all())

    def test_a_stopped_read_ends(self, tmp_path: Path) -> None:
        source = self._opened(tmp_path, {"t": noise("F32", (64,), 1)})
        reads = [Read(name, Box.whole(t.shape), t) for name, t in blank(source).items()]
        assert self._stopped(source, reads)
        source.close()

    def test_views_and_aliases(self, tmp_path: Path) -> None:
        """B100: what is sent are the elements a tensor shows, not the memory behind it."""
        base = noise("BF16", (12, 20), 5)
        tensors = {
            "columns": base[:, 3:9],
            "transposed": base.t(),
            "every.other": base[::2, 1::3],
            "repeated": base[:1].expand(4, 20),
            "tied.a": base,
            "tied.b": base,
        }
        source = self._opened(tmp_path, tensors)
        assert digests(fetch(source)) == digests(tensors)
        source.close()

    def test_a_closed_source_is_not_read(self, tmp_path: Path) -> None:
        source = self._opened(tmp_path, {"t": noise("F32", (4, 4), 1)})
        source.close()
        source.close()
        assert self._code(source, [Read("t", Box.whole((4, 4)), torch.empty(4, 4))])

    def test_damage_is_refused_or_shows_in_the_digest(self, tmp_path: Path) -> None:
        """Whatever happens on the way, the receiver never holds wrong bytes and a digest that says they are right."""
        for kind in DAMAGE:
            folder = tmp_path / kind
            folder.mkdir()
            tensors = {name: noise("BF16", (16, 16), at) for at, name in enumerate(("a", "b", "c"))}
            self.send(folder, tensors)
            assert self._outcome(folder, kind, tensors) == ("differs" if kind in self.differs else "refused"), kind

    def _outcome(self, folder: Path, kind: str, tensors: dict[str, torch.Tensor]) -> str:
        if kind != "stale":
            self.damage(folder, kind, "b")
        try:
            source = self.connect(folder)
        except LiveweightsError:
            return "refused"
        try:
            if kind == "stale":
                self.damage(folder, kind, "b")
            arrived = fetch(source)
            source.recheck()
        except LiveweightsError:
            return "refused"
        finally:
            source.close()
        wrong = [name for name, digest in digests(tensors).items() if digests(arrived).get(name) != digest]
        return "differs" if wrong == ["b"] else f"wrong: {wrong}"

    def _opened(self, folder: Path, tensors: dict[str, torch.Tensor]) -> Source:
        self.send(folder, tensors)
        return self.connect(folder)

    @staticmethod
    def _stopped(source: Source, reads: list[Read]) -> bool:
        try:
            source.read(reads, should_stop=lambda: True)
        except Cancelled:
            return True
        return False

    @staticmethod
    def _code(source: Source, reads: list[Read]) -> str:
        try:
            source.read(reads)
        except LiveweightsError as error:
            return error.code
        return ""


class StoredContract(TransportContract):
    """For sources that lie somewhere, and can be read as often as one likes."""

    def test_reading_again_changes_nothing(self, tmp_path: Path) -> None:
        tensors = samples()
        source = self._opened(tmp_path, tensors)
        assert digests(fetch(source)) == digests(fetch(source)) == digests(tensors)
        source.close()

    def test_a_stopped_read_leaves_the_source_usable(self, tmp_path: Path) -> None:
        tensors = {f"t{at}": noise("F32", (64,), at) for at in range(4)}
        source = self._opened(tmp_path, tensors)
        assert self._stopped(source, [Read(name, Box.whole(t.shape), t) for name, t in blank(source).items()])
        assert digests(fetch(source)) == digests(tensors)
        source.close()


def noise(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes as a tensor: every bit pattern occurs, NaN too."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (prod(shape) * itemsize(dtype),), dtype=torch.uint8, generator=generator)
    if dtype == "BOOL":
        data &= 1
    return data.view(TORCH_DTYPES[dtype]).reshape(shape)


def samples() -> dict[str, torch.Tensor]:
    """Every dtype that torch holds with one value per element, a scalar, an empty tensor, one of odd width."""
    tensors = {f"dtype.{name}": noise(name, (6, 10), at) for at, name in enumerate(TORCH_DTYPES) if name != "F4"}
    tensors["scalar"] = noise("F32", (), 90)
    tensors["one"] = noise("BF16", (1,), 91)
    tensors["empty"] = torch.empty(0, 16)
    tensors["odd"] = noise("F8_E4M3", (7, 13), 92)
    return tensors


def blank(source: Source) -> dict[str, torch.Tensor]:
    """Targets for everything, filled with bytes that no test sends."""
    return {
        name: torch.full((max(spec.nbytes, 1),), 0xCD, dtype=torch.uint8)[: spec.nbytes]
        .view(TORCH_DTYPES[spec.dtype])
        .reshape(spec.shape)
        for name, spec in source.specs.items()
    }


def fetch(source: Source) -> dict[str, torch.Tensor]:
    """Everything, whole."""
    targets = blank(source)
    source.read([Read(name, Box.whole(target.shape), target) for name, target in targets.items()])
    return targets


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}
