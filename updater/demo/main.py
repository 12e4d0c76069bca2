"""The demo: a coordinator, a replica over two ranks and one over one, clients that never stop, and a trainer.

A composition root: it may import everything. It speaks to the fleet only as a trainer and as clients do, over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from updater.cli import views
from updater.core.errors import LiveweightsError
from updater.demo.clients import Load, Verdict, judge
from updater.demo.processes import Child, Children, ProcessFailed, free_port
from updater.demo.report import ReportRow, report_of, table
from updater.protocol.answers import Receipt

if TYPE_CHECKING:
    from trainer_side import AsyncClient

T = TypeVar("T")
VERSIONS = 6  # five published one after the other, and one more that is first pushed broken, then repaired
MAX_TOKENS = 24
REPLIES_EACH = 4  # finished on every replica before the next publication
MARGIN = 1.0  # of the top logit over the second; below it a step is not compared
_PREFIXES = (
    "The lighthouse keeper wrote down every ship that passed: ",
    "Publish, then verify, then commit, and then: ",
)
_ENDINGS = ("the brig", "the sloop at dawn", "nothing today")


@dataclass(slots=True)
class DemoRun:
    """What the acts share."""

    folder: Path
    checkpoints: tuple[Path, ...]  # what the engines start on, then one per version
    url: str
    load: Load
    rows: list[ReportRow] = field(default_factory=list)

    @property
    def pushed(self) -> Path:
        return self.folder / "pushed"


def run(report: Path, *, keep: bool = False) -> bool:
    """Show everything, write the report, and say whether all of it went as it must."""
    folder = Path(tempfile.mkdtemp(prefix="liveweights-demo-"))
    children = Children(folder)
    failed = ""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, children.interrupt)
    try:
        say("writing seven small checkpoints, and asking plain generate what each of them says")
        checkpoints = _checkpoints(folder)
        prompts = [tuple((prefix + ending).encode()) for prefix in _PREFIXES for ending in _ENDINGS]
        expected = _expected(checkpoints, prompts)
        say("starting a coordinator, a replica over two ranks and a replica over one")
        coordinator, replicas = _start(children, folder, checkpoints[0])
        urls = {child.name: child.url for child in replicas}
        demo = DemoRun(folder, checkpoints, coordinator.url, Load(urls, prompts, MAX_TOKENS))
        asyncio.run(_play(demo))
        verdict = judge(demo.load.replies, expected, margin=MARGIN, max_tokens=MAX_TOKENS)
    except (ProcessFailed, TimeoutError, LiveweightsError, ExceptionGroup) as error:
        failed = f"{type(error).__name__}: {error}"
        for child in children.running:
            views.err.print(f"--- {child.name}\n{child.tail()}", markup=False)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # what is being stopped is stopped to the end
            signal.signal(number, signal.SIG_IGN)
        leftovers = children.stop()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"kept: {folder}")
    if failed:
        views.err.print(f"the demo broke off: {failed}", markup=False, style="red")
        return False
    return _conclude(demo, verdict, leftovers, report)


def say(text: str) -> None:
    views.err.print(f"[dim]{text}[/dim]", highlight=False, soft_wrap=True)


# --- the stage -----------------------------------------------------------------------------------------------------


def _checkpoints(folder: Path) -> tuple[Path, ...]:
    import torch

    from engine_adapter.models import make_versions

    torch.set_num_threads(1)
    return make_versions(folder / "models", VERSIONS + 1)


def _expected(checkpoints: Sequence[Path], prompts: Sequence[tuple[int, ...]]) -> dict[str, list[Any]]:
    """Version label -> per prompt, what plain generation on that checkpoint says."""
    from engine_adapter.models import reference_tokens

    labels = ["start", *(f"0-{step}" for step in range(1, VERSIONS + 1))]
    return {
        label: [reference_tokens(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
        for label, checkpoint in zip(labels, checkpoints, strict=True)
    }


def _start(children: Children, folder: Path, model: Path) -> tuple[Child, list[Child]]:
    port = free_port()
    common = ["--root", str(folder)]
    serve = ["serve", "--new-fleet", "--port", str(port), "--state", str(folder / "state"), *common]
    coordinator = children.start("coordinator", serve, port)
    children.wait_ready(coordinator, "/healthz")
    replicas = []
    for name, ranks in (("pair", 2), ("single", 1)):
        port = free_port()
        arguments = ["engine", "--model", str(model), "--tp", str(ranks), "--port", str(port), "--replica", name]
        replicas.append(children.start(name, [*arguments, "--coordinator", coordinator.url, *common], port))
    for child in replicas:
        children.wait_ready(child)
    return coordinator, replicas


# --- the play ------------------------------------------------------------------------------------------------------


async def _play(demo: DemoRun) -> None:
    clients = asyncio.create_task(demo.load.run())
    try:
        await demo.load.wait_for("start", REPLIES_EACH)
        for act in (_publish_five, _offer_broken_ones, _ask_again, _repair, _go_back):
            await act(demo)
    finally:
        demo.load.stop()
        await clients


async def _publish_five(demo: DemoRun) -> None:
    """The first as curl would, by the path of a bare folder; the others from a state dict, with digests."""
    body = {"id": "first", "version": 1, "path": str(demo.checkpoints[1])}
    await _act(demo, "bare folder, drain", "0-1", _poster(demo, body), "committed")
    for step in (2, 3, 4):
        await _act(demo, "state dict, drain", f"0-{step}", _pusher(demo, step, {}), "committed")
    await _act(demo, "state dict, abort", "0-5", _pusher(demo, 5, {"in_flight": "abort"}), "committed")


async def _offer_broken_ones(demo: DemoRun) -> None:
    whole = demo.checkpoints[6]
    for what, corrupt, code in (
        ("truncated", truncate, "file_truncated"),
        ("a tensor missing", drop_tensor, "tensor_missing"),
        ("K and V swapped", swap_keys_and_values, "tensor_digest"),
    ):
        broken = demo.folder / what.replace(" ", "-")
        await asyncio.to_thread(corrupted, whole, broken, corrupt)
        outcome = "aborted" if code == "tensor_digest" else "rejected"
        body = {"version": 6, "path": str(broken)}
        await _act(demo, what, "0-6", _poster(demo, body), outcome, code=code, live="0-5")


async def _ask_again(demo: DemoRun) -> None:
    first = next(row.receipt for row in demo.rows if row.version == "0-1")
    body = {"id": "first", "version": 1, "path": str(demo.checkpoints[1])}
    again = await _poster(demo, body)()
    same = again == first and (await _live(demo)) == "0-5"
    demo.rows.append(ReportRow("the first request again", "0-1", "same receipt" if same else "ANOTHER EFFECT", same))
    stale = {"version": 3, "path": str(demo.checkpoints[3])}
    await _act(demo, "a stale version", "0-3", _poster(demo, stale), "rejected", code="stale_version", live="0-5")


async def _repair(demo: DemoRun) -> None:
    """What was refused left its version free: the repaired weights may have it."""
    await _act(demo, "state dict, repaired", "0-6", _pusher(demo, 6, {}), "committed")


async def _go_back(demo: DemoRun) -> None:
    await _act(demo, "rollback", "0-5", lambda: _asked(demo, lambda client: client.rollback()), "committed")


async def _act(
    demo: DemoRun,
    what: str,
    version: str,
    call: Callable[[], Awaitable[Receipt]],
    outcome: str,
    *,
    code: str = "",
    live: str = "",
) -> None:
    """Do one transaction, note how it ended, and wait until clients of every replica have seen the result.

    `code`, `live`: of a refusal: its cause, and what must still be live. Such a one must not have paused anything.
    """
    try:
        receipt: Receipt | None = await call()
        ended, found = "committed", ""
    except LiveweightsError as error:
        if error.code == "unreachable":
            raise
        receipt = Receipt.model_validate(error.receipt) if error.receipt else None
        ended, found = type(error).__name__.lower(), error.code
    now = await _live(demo)
    quiet = receipt is None or receipt.pause is None
    expected = ended == outcome and found == code and now == (live or version) and (quiet or ended == "committed")
    demo.rows.append(ReportRow(what, version, ended, expected, found, receipt))
    say(f"{what} {version}: {ended} {found}")
    await demo.load.wait_for(now, REPLIES_EACH)


# --- what a trainer says -------------------------------------------------------------------------------------------


async def _asked(demo: DemoRun, verb: Callable[[AsyncClient], Awaitable[T]]) -> T:
    from trainer_side import AsyncClient

    async with AsyncClient(demo.url, "") as client:
        return await verb(client)


def _poster(demo: DemoRun, body: dict[str, Any]) -> Callable[[], Awaitable[Receipt]]:
    return lambda: _asked(demo, lambda client: client.update(body))


async def _live(demo: DemoRun) -> str:
    return (await _asked(demo, lambda client: client.version())).version or ""


def _pusher(demo: DemoRun, step: int, policy: dict[str, str]) -> Callable[[], Awaitable[Receipt]]:
    """`push(state_dict, version)` as a trainer calls it, in a thread so that the clients stream on."""

    def push() -> Receipt:
        from safetensors.torch import load_file

        from trainer_side import push

        source = demo.checkpoints[step]
        weights = load_file(source / "model.safetensors")
        return push(weights, step, url=demo.url, token="", directory=demo.pushed, config_from=source, policy=policy)

    return lambda: asyncio.to_thread(push)


# --- the end -------------------------------------------------------------------------------------------------------


def _conclude(demo: DemoRun, verdict: Verdict, leftovers: Sequence[str], report: Path) -> bool:
    load = demo.load
    unexpected = [row.what for row in demo.rows if not row.expected]
    views.out.print(table(demo.rows))
    for row in demo.rows:
        if row.receipt and row.receipt.pause:
            views.out.print(f"{row.version} {row.what}: {views.pause_parts(row.receipt)}", highlight=False)
    cached = sum(reply.cached_tokens > 0 for reply in load.replies)
    aborted = sum(reply.finish_reason == "abort" for reply in load.replies)
    views.out.print(
        f"{verdict.compared} tokens compared with plain generate, {verdict.left_out} left out (margin below {MARGIN:g})"
        f"; {cached} replies used shared prefixes, {aborted} were ended early by the update that asked for it"
    )
    if load.turned_away:
        views.out.print(f"turned away while shut: {dict(load.turned_away)}")
    for fault in (*verdict.mixed[:10], *load.broken[:10], *leftovers):
        views.err.print(fault, style="red", markup=False)
    for what in unexpected:
        views.err.print(f"did not end as it must: {what}", style="red", markup=False)
    views.out.print(f"[bold]mixed replies: {len(verdict.mixed)} of {verdict.replies}[/bold]")
    report.write_text(json.dumps(report_of(demo.rows, load, verdict), indent=2) + "\n")
    return not (verdict.mixed or unexpected or load.broken or leftovers) and verdict.compared > 0


def corrupted(whole: Path, broken: Path, corrupt: Callable[[Path], None]) -> None:
    from transports.disk.manifests import write_manifest

    shutil.copytree(whole, broken)
    write_manifest(str(broken))  # of the weights as they should be
    corrupt(broken)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size - 1000)


def drop_tensor(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    # A manifest would give it away before the engine's own expectations do.
    (folder / "liveweights.manifest.json").unlink()


def swap_keys_and_values(folder: Path) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
        tensors[k], tensors[v] = tensors[v], tensors[k]

    _rewrite(folder, swap)


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
