"""What several commands of the command line have in common: exit codes, options, progress, and how each one ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from updater.core.errors import LiveweightsError, RolledBack, Unauthorized, Unavailable
from updater.core.policy import SourceLayout

if TYPE_CHECKING:
    from trainer_side.client.client import Client
    from updater.protocol.answers import Receipt, UpdateState


class Exit(IntEnum):
    OK = 0
    REFUSED = 1
    USAGE = 2
    UNAVAILABLE = 3
    ROLLED_BACK = 4
    UNAUTHORIZED = 5


class Transport(StrEnum):
    """How a checkpoint's bytes reach the engines."""

    DISK = "disk"
    BROADCAST = "broadcast"
    SHARED_MEMORY = "shared_memory"
    CUDA_IPC = "cuda_ipc"


Url = Annotated[str, typer.Option(envvar="LIVEWEIGHTS_URL", help="The coordinator.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for programs.")]
Roots = Annotated[
    list[Path] | None, typer.Option("--root", help="Folder under which checkpoints must lie; repeatable.")
]
DEFAULT_URL = "http://127.0.0.1:8700"
MANIFEST = "liveweights.manifest.json"


@contextmanager
def errors_shown(as_json: bool) -> Iterator[None]:
    """Typed errors become exit codes; tracebacks are left for what is not expected."""
    from updater.cli import views
    from updater.server.security import ConfigurationError

    try:
        yield
    except LiveweightsError as error:
        views.error(error, as_json=as_json)
        raise typer.Exit(exit_code(error)) from None
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None


def exit_code(error: LiveweightsError) -> Exit:
    """The exit code that an error's consequence maps to."""
    if isinstance(error, RolledBack):
        return Exit.ROLLED_BACK
    if isinstance(error, Unauthorized):
        return Exit.UNAUTHORIZED
    if isinstance(error, Unavailable):
        return Exit.UNAVAILABLE
    return Exit.REFUSED


def client_of(url: str) -> Client:
    from trainer_side.client.client import Client

    return Client(url)


def follow(client: Client, body: dict[str, Any]) -> Receipt:
    """Begin, show the phases as they come, and return the receipt or raise what the outcome says."""
    from updater.cli import views

    with views.phase_bar(f"version {body['version']}") as show:
        begun = client.begin(body)
        for name, data in client.events(begun.id):
            show(name, data)
        # Asked again under its id, a finished update answers with its receipt, or the error that embeds it.
        return client.update({**body, "id": begun.id})


def stream(
    path: Path, transport: Transport, dtypes: str | dict[str, str] | None, url: str, body: dict[str, Any]
) -> Receipt:
    """Send a checkpoint tensor by tensor; engines need not see its files."""
    from trainer_side.publishing.pusher import Pusher

    def send(told: Callable[[int], None]) -> Receipt:
        with Pusher(url, transport=transport.value, dtypes=dtypes) as pusher:
            return pusher.push(
                path,
                body["version"],
                policy=body["policy"],
                id=body.get("id"),
                base_version=body.get("base_version"),
                progress=told,
            )

    receipt: Receipt = _with_bar(path, f"version {body['version']} sent", send)
    return receipt


def said(state: UpdateState) -> None:
    from updater.cli import views

    ended = f": {state.receipt.outcome}" if state.receipt is not None else ""
    views.out.print(f"{state.id} ({state.version}) is {state.phase}{ended}", markup=False)


def finish(receipt: Receipt, as_json: bool) -> None:
    from updater.cli import views

    views.finished(receipt, as_json=as_json)


def write_manifest(directory: Path, layouts: Sequence[tuple[str, SourceLayout]] = ()) -> Any:
    from transports.disk import manifests

    def write(told: Callable[[int], None]) -> Any:
        return manifests.write_manifest(str(directory), told, layouts=layouts)

    return _with_bar(directory, "digests", write)


def check_manifest(directory: Path) -> Any:
    from transports.disk import manifests

    return _with_bar(directory, "comparing", lambda told: manifests.verify_manifest(str(directory), told))


def _with_bar(directory: Path, what: str, work: Callable[[Callable[[int], None]], Any]) -> Any:
    from updater.cli import views

    total = sum(file.stat().st_size for file in directory.glob("*.safetensors")) if directory.is_dir() else None
    with views.byte_bar(what, total) as told:
        return work(told)


def named_url(text: str) -> tuple[str, str]:
    name, mark, url = text.partition("=")
    if not mark or not name or not url:
        raise typer.BadParameter(f"{text!r} is not NAME=URL, for example r0=http://127.0.0.1:8800")
    return name, url


def option_of(text: str) -> tuple[str, str | int | float | bool]:
    """KEY=VALUE with the value read as JSON where it is a number or a boolean."""
    import json

    key, mark, value = text.partition("=")
    if not mark or not key:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    return key, parsed if isinstance(parsed, str | int | float | bool) else value
