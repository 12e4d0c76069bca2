"""A rank's plan of one update: the opened source, the placement, every check that needs no tensor byte; and the
replay of that plan on the source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from engine_adapter.base import RankEngine
from engine_adapter.placement.casts import FLOATS, Cast, cast_between
from engine_adapter.placement.coverage import check_destination, check_rows, source_boxes
from engine_adapter.placement.regions import target_region
from engine_adapter.placement.rows import CarryRow, CopyRow, FillRow, Placement
from engine_adapter.placement.spelling import Proved, Stated, respelled, shown, stated_layouts
from engine_adapter.placement.values import SourceBoxes, WireTensor
from engine_adapter.rank.messages import RankPlan, RankPlanReply, completed
from transports.base import Box, Cancelled, Read, Source
from transports.disk.source import DiskSource, source_document
from transports.dtypes import DTYPE_NAMES
from transports.scans import nonfinite
from transports.stream import StreamSource
from updater.core.errors import Aborted, Failure, Rejected
from updater.core.participant import Offer, StreamOffer
from updater.protocol.manifest import DTYPE_BITS, Manifest, TensorSpec
from updater.protocol.model_document import ModelDocument

#: (offer, roots, manifest as JSON text or empty, number of this receiver in a stream) -> an opened source.
Opener = Callable[[Offer, tuple[str, ...], str, int], Source]


@dataclass(slots=True)
class Plan:
    """`casts`: one entry per copy row whose dtypes differ, by its index in `placement.rows`.

    `own_redundant`: aliases whose bytes this rank digests for all (each is read by one rank only). `stated`: how
    sources lie, as the publication, the fleet or the manifest says.
    """

    request: RankPlan
    source: Source
    specs: Mapping[str, TensorSpec]
    placement: Placement
    casts: Mapping[int, Cast]
    own_redundant: tuple[str, ...]
    reply: RankPlanReply
    stated: Mapping[str, Stated] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)
    closed: bool = False

    def close(self) -> None:
        """Let the source go; again: nothing."""
        if not self.closed:
            self.closed = True
            self.source.close()

    @property
    def sees_gaps(self) -> bool:
        """Whether it would be noticed that something the source never wrote stayed in the spare: the trainer promised a
        digest for every loaded tensor, or the stream counts what arrives.
        """
        known = _manifest_digests(self.source)
        return isinstance(self.source, StreamSource) or all(known.get(name) for name in self.placement.loaded)


def make_plan(
    engine: RankEngine,
    tensors: Mapping[str, torch.Tensor],
    request: RankPlan,
    open_source: Opener,
    proved: Proved | None = None,
) -> Plan:
    """`proved`: the spelling that the engine started on. Raises `LiveweightsError` with everything that is wrong;
    nothing is held then.
    """
    source = open_source(request.offer, request.roots, request.manifest, request.first + engine.rank)
    try:
        return _planned(engine, tensors, request, source, proved)
    except BaseException:
        source.close()
        raise


def _planned(
    engine: RankEngine,
    tensors: Mapping[str, torch.Tensor],
    request: RankPlan,
    source: Source,
    proved: Proved | None,
) -> Plan:
    if isinstance(source, DiskSource) and source.ambiguous and not request.known:
        raise Rejected(*(failure.at(rank=engine.rank) for failure in source.ambiguous))
    manifest = source.manifest
    patterns = manifest.ignored if manifest is not None else ()
    specs = {n: s for n, s in source.specs.items() if not any(fnmatchcase(n, pattern) for pattern in patterns)}
    placement, stated, words = _placed(engine, specs, request, manifest, proved)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    failures = _name_failures(placement) or check_rows(placement, specs, shapes)
    if not failures:
        failures += check_destination(placement, shapes)
        casts, refused = _casts(placement, specs, tensors, request)
        failures += refused
    if failures:
        raise Rejected(*(failure.at(rank=engine.rank) for failure in failures))
    own = tuple(a for i, (a, _) in enumerate(placement.redundant) if i % engine.size == engine.rank)
    if isinstance(source, StreamSource):
        source.watch(own)
    return Plan(
        request=request,
        source=source,
        specs=specs,
        placement=placement,
        casts=casts,
        own_redundant=own,
        reply=_reply(engine.rank, placement, specs, own, source, words, _model(engine, request, source)),
        stated=stated,
    )


def _placed(
    engine: RankEngine,
    specs: Mapping[str, TensorSpec],
    request: RankPlan,
    manifest: Manifest | None,
    proved: Proved | None,
) -> tuple[Placement, Mapping[str, Stated], tuple[str, ...]]:
    """The placement, what is stated of sources that it has, and what of that was taken.

    A start is placed as the engine's loader does it: its replay is the proof. Raises `LiveweightsError`.
    """
    stated = stated_layouts(specs, request.layouts, manifest.layouts if manifest is not None else ())
    if request.start or proved is None:
        return engine.placement(specs), stated, ()
    try:
        placement, words = respelled(proved, specs, engine.placement(shown(specs, stated)), stated)
    except Rejected as error:
        raise Rejected(*(failure.at(rank=engine.rank) for failure in error.failures)) from None
    return placement, stated, words


def _model(engine: RankEngine, request: RankPlan, source: Source) -> ModelDocument | None:
    """What the source says of the model. The start checkpoint, and what was known before, is compared with nothing."""
    if engine.rank or request.start or request.known:
        return None
    return completed(source_document(source), engine)


def _name_failures(placement: Placement) -> list[Failure]:
    return [Failure("tensor_missing", "the source lacks it", tensor=name) for name in placement.missing] + [
        Failure("tensor_unexpected", "no rule knows this name", tensor=name) for name in placement.unexpected
    ]


def _casts(
    placement: Placement, specs: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor], request: RankPlan
) -> tuple[dict[int, Cast], list[Failure]]:
    casts: dict[int, Cast] = {}
    streamed = isinstance(request.offer, StreamOffer)
    failures: dict[tuple[str, str], Failure] = {}
    for i, row in enumerate(placement.rows):
        if not isinstance(row, CopyRow):
            continue
        have, want = specs[row.source].dtype, DTYPE_NAMES.get(tensors[row.target].dtype, "?")
        cast = Cast.NONE if DTYPE_BITS[have] < 8 else cast_between(have, want)
        if cast is Cast.NARROW and streamed:
            why = f"{have} into a {want} parameter: cast it before it is sent; a stream is not read twice to prove it"
            hint = f'pass dtypes={{"*": "{want}"}} (--dtypes {want}) to push, which rounds what it sends'
            failures[row.source, row.target] = Failure("tensor_narrowing", why, tensor=row.source, hint=hint)
        elif cast is Cast.NARROW and (have, want) not in {tuple(pair) for pair in request.allow_narrowing}:
            why = f"{have} into a {want} parameter loses bits; the policy does not allow it"
            hint = f'allow_narrowing=[["{have}", "{want}"]] (--narrow {have}:{want}) lets the engine round it'
            failures[row.source, row.target] = Failure("tensor_narrowing", why, tensor=row.source, hint=hint)
        elif cast is Cast.NONE:
            why = f"{have} cannot feed the {want} parameter {row.target}"
            failures[row.source, row.target] = Failure("tensor_dtype", why, tensor=row.source)
        elif cast is not Cast.SAME:
            casts[i] = cast
    return casts, list(failures.values())


def dtypes_held(placement: Placement, tensors: Mapping[str, torch.Tensor], derived: frozenset[str]) -> dict[str, str]:
    """Source tensor -> dtype of the parameter that it feeds. Empty where a rounding is not all that is done to it: the
    parameter is of no dtype that a weight is rounded to, something is computed from it (`derived`), or there are
    parameters of several dtypes.
    """
    found: dict[str, str] = {}
    for row in placement.rows:
        if not isinstance(row, CopyRow):
            continue
        dtype = DTYPE_NAMES.get(tensors[row.target].dtype, "")
        if dtype not in FLOATS or row.target in derived or found.get(row.source, dtype) != dtype:
            dtype = ""
        found[row.source] = dtype
    return found | {alias: found.get(canonical, "") for alias, canonical in placement.redundant}


def _reply(
    rank: int,
    placement: Placement,
    specs: Mapping[str, TensorSpec],
    own: tuple[str, ...],
    source: Source,
    words: tuple[str, ...],
    model: ModelDocument | None,
) -> RankPlanReply:
    digests = _manifest_digests(source)
    names = sorted(placement.loaded | {alias for alias, _ in placement.redundant})
    wire = tuple(WireTensor(n, specs[n].dtype, specs[n].shape, digests.get(n, "")) for n in names)
    ties = tuple(SourceBoxes(alias, (Box.whole(specs[alias].shape),)) for alias in own)
    boxes = tuple(sorted((*source_boxes(placement), *ties), key=lambda each: each.name))
    return RankPlanReply(
        tensors=wire if rank == 0 else (),
        boxes=boxes,
        redundant=placement.redundant,
        manifest_digest="" if source.manifest is None else source.manifest.digest,
        bytes_to_read=sum(_nbytes(specs[each.name], box) for each in boxes for box in each.boxes),
        warnings=(*source.warnings, *_warnings(placement, specs, source), *words),
        model=model,
    )


def _warnings(placement: Placement, specs: Mapping[str, TensorSpec], source: Source) -> tuple[str, ...]:
    found = [f"ignored: {name} ({pattern})" for name, pattern in placement.ignored]
    found += [f"tied: {name} came alone and fed {' and '.join(fed)}" for name, fed in placement.tied]
    skipped = len(source.specs) - len(specs)
    if skipped:
        found.append(f"ignored: {skipped} tensors that the manifest lists as ignored")
    return tuple(found)


def _nbytes(spec: TensorSpec, box: Box) -> int:
    return box.numel * DTYPE_BITS[spec.dtype] // 8


def _manifest_digests(source: Source) -> dict[str, str]:
    return {} if source.manifest is None else {entry.name: entry.digest for entry in source.manifest.tensors}


@dataclass(frozen=True, slots=True)
class CancelToken:
    """Whether long work should end: its update was cancelled, or its time is over (I9)."""

    cancelled: Callable[[], bool]
    deadline: float  # of `clock`
    clock: Callable[[], float]

    def __call__(self) -> bool:
        return self.cancelled() or self.clock() >= self.deadline

    def check(self) -> None:
        """Raises `Aborted`: `client_abort` when cancelled, `phase_timeout` when late."""
        if self():
            raise self.error()

    def error(self) -> Aborted:
        if self.cancelled():
            return Aborted(Failure("client_abort", "the update was dropped while this rank was at work"))
        return Aborted(Failure("phase_timeout", "the rank's time for this step is over"))


def replay(
    plan: Plan,
    live: Mapping[str, torch.Tensor],
    spare: Mapping[str, torch.Tensor],
    stop: CancelToken,
    progress: Callable[[int], None],
) -> int:
    """Fill the spare of a checked plan; bytes asked for. Raises `LiveweightsError`; the spare is then a mix.

    `progress` hears increments of bytes.

    Fills and carried regions go first: no copy lies under one (see `check_destination`), so the order of the copies
    is the reader's to choose.
    """
    for row in plan.placement.rows:
        stop.check()
        if isinstance(row, FillRow):
            spare[row.target][row.target_box.slices()].fill_(row.value)
        elif isinstance(row, CarryRow):
            region = row.target_box.slices()
            spare[row.target][region].copy_(live[row.target][region])
    copies = [row for row in plan.placement.rows if isinstance(row, CopyRow) and row.source_box.numel]
    reads = [Read(row.source, row.source_box, target_region(spare[row.target], row), row.permute) for row in copies]
    try:
        report = plan.source.read(reads, progress=progress, should_stop=stop)
    except Cancelled:
        raise stop.error() from None
    plan.source.recheck()
    if not plan.request.allow_nonfinite:
        _refuse_nonfinite(copies, spare, stop)
    return report.bytes_asked


def _refuse_nonfinite(rows: list[CopyRow], spare: Mapping[str, torch.Tensor], stop: CancelToken) -> None:
    """A whole parameter is looked at first; only where that says no, the rows are, to name the tensor."""
    suspect: set[str] = set()
    for target in dict.fromkeys(row.target for row in rows):
        stop.check()
        if _can_be_nonfinite(spare[target]) and nonfinite(spare[target]):
            suspect.add(target)
    bad = [row.source for row in rows if row.target in suspect and nonfinite(target_region(spare[row.target], row))]
    if bad:
        why = "NaN or an infinity arrived; the policy does not allow it"
        raise Aborted(*(Failure("tensor_nonfinite", why, tensor=name) for name in dict.fromkeys(bad)))


def _can_be_nonfinite(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
