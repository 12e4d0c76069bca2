"""The command line. A composition root: it may import everything, and imports each part only when it is used.

Exit codes: 0 done or committed; 1 rejected or aborted (nothing was installed), or faults found; 2 usage;
3 no answer, or none now; 4 rolled back (something was installed and taken back); 5 no or wrong token.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from updater.cli.policies import OF_A_ROLLBACK, Dtypes, Layouts, Suspicious, dtypes_of, layouts_of, takes_policy
from updater.cli.steps import (
    DEFAULT_URL,
    MANIFEST,
    Exit,
    Json,
    Roots,
    Transport,
    Url,
    check_manifest,
    client_of,
    errors_shown,
    finish,
    follow,
    named_url,
    option_of,
    said,
    stream,
    write_manifest,
)
from updater.core.errors import Failure, Unavailable, refuse
from updater.core.participant import ReleaseTo
from updater.core.policy import CommitMode

app = typer.Typer(
    name="liveweights",
    help="Publish new weights into running LLM engines the way a database commits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Other than loopback needs a token in the environment.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8700,
    root: Roots = None,
    state: Annotated[
        Path | None,
        typer.Option(
            envvar="LIVEWEIGHTS_STATE",
            help="Folder of the journal and the manifests. Default: ~/.local/state/liveweights/FLEET.",
        ),
    ] = None,
    take_over: Annotated[
        bool, typer.Option(help="Also if a coordinator that lives or stands still has the state folder: it stops.")
    ] = False,
    fleet: Annotated[str, typer.Option(help="Name of the fleet.")] = "default",
    allow_network: Annotated[
        list[str] | None,
        typer.Option(help="CIDR network that replicas may join from; repeatable. Default: see docs/security.md."),
    ] = None,
    history: Annotated[int, typer.Option(min=1, help="Requests whose receipts are kept whole.")] = 1000,
    allow_suspicious: Suspicious = None,
    layout: Layouts = None,
    new_fleet: Annotated[
        bool,
        typer.Option("--new-fleet", help="On an empty journal: do not wait for replicas of an older fleet to call."),
    ] = False,
) -> None:
    """Run the coordinator. Tokens come from LIVEWEIGHTS_ADMIN_TOKEN and LIVEWEIGHTS_INFERENCE_TOKEN."""
    with errors_shown(False):
        from updater.server.security import Tokens
        from updater.server.serving import serve as run
        from updater.settings import Settings

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        settings = Settings(
            state=state,
            fleet=fleet,
            host=host,
            port=port,
            roots=tuple(root or ()),
            tokens=Tokens.from_env(),
            history=history,
            allow_suspicious=tuple(allow_suspicious or ()),
            layouts=tuple(layouts_of(layout)),
            allow_networks=tuple(allow_network or ()),
            new_fleet=new_fleet,
        )
        try:
            run(settings, take_over=take_over)
        except OSError as error:
            raise Unavailable(Failure("unreachable", str(error.strerror))) from None


@app.command()
def engine(
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkpoint folder to start on.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks of this replica.")] = 1,
    host: Annotated[str, typer.Option(help="Other than loopback needs a token in the environment.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8800,
    coordinator: Annotated[str, typer.Option(help="Join this coordinator; empty: stand alone.")] = "",
    replica: Annotated[str, typer.Option(help="Name of this replica; default: host and port.")] = "",
    root: Roots = None,
    kind: Annotated[str, typer.Option("--engine", help="transformers, or toy.")] = "transformers",
    option: Annotated[list[str] | None, typer.Option(help="Engine option KEY=VALUE; repeatable.")] = None,
) -> None:
    """Run one replica: a front and its ranks, with /v1/completions and the participant contract."""
    with errors_shown(False):
        from engine_adapter.replica import launch
        from trainer_side.client.client import address

        settings = launch.settings(
            model=model,
            tp=tp,
            host=host,
            port=port,
            coordinator=address(coordinator) if coordinator else "",
            replica=replica,
            roots=tuple(root or ()),
            engine=kind,
            options=dict(option_of(text) for text in option or ()),
        )
        raise typer.Exit(launch.run_engine(settings))


@app.command()
@takes_policy()
def push(
    path: Annotated[Path, typer.Argument(help="A safetensors file, a folder, or an index file.")],
    version: Annotated[str, typer.Argument(help="A step of the current run, or run-step.")],
    policy: dict[str, Any],
    url: Url = DEFAULT_URL,
    base: Annotated[str | None, typer.Option(help="Refuse unless this version is live.")] = None,
    new_run: Annotated[bool, typer.Option(help="Open the next run; VERSION is a step of it.")] = False,
    manifest: Annotated[bool, typer.Option(help="Write the manifest beside the checkpoint first.")] = False,
    id: Annotated[str | None, typer.Option(help="Idempotency key; default: run-step; fresh for a stream.")] = None,
    transport: Annotated[
        Transport, typer.Option(help="Other than disk, this process sends the bytes.")
    ] = Transport.DISK,
    dtypes: Dtypes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only plan: say what would refuse it before a tensor is read.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Publish a checkpoint and wait for the receipt."""
    from updater.protocol.manifest import real_path

    body: dict[str, Any] = {
        "path": real_path(str(path)),
        "version": int(version) if version.isdecimal() else version,
        "policy": policy | {"new_run": new_run},
    }
    body |= {"id": id} if id else {}
    body |= {"base_version": base} if base else {}
    body |= {"dry_run": True} if dry_run else {}
    casts = dtypes_of(dtypes)
    with errors_shown(as_json):
        if transport is Transport.DISK and casts:
            hint = "--transport shared_memory (or broadcast) casts; --narrow SOURCE:PARAMETER lets the engine round it"
            raise refuse("bad_request", "--dtypes: a checkpoint on disk is read as it lies there", hint=hint)
        if transport is not Transport.DISK and dry_run:
            hint = "without --transport, where the fleet can read the folder"
            raise refuse("mode_unsupported", "--dry-run looks at a source on disk", hint=hint)
        if manifest:
            write_manifest(path)
        if transport is not Transport.DISK:
            finish(stream(path, transport, casts, url, body), as_json)
            return
        with client_of(url) as client:
            finish(follow(client, body), as_json)


@app.command()
@takes_policy()
def watch(
    directory: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of checkpoint folders.")],
    policy: dict[str, Any],
    url: Url = DEFAULT_URL,
    marker: Annotated[str, typer.Option(help="File that is written last.")] = MANIFEST,
    settle: Annotated[
        float | None, typer.Option(min=0.0, help="Also take checkpoints without a marker, unchanged for SECONDS.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end as a push would.")] = False,
    new_run: Annotated[bool, typer.Option("--new-run", help="Open the next run with what changed last.")] = False,
    as_json: Json = False,
) -> None:
    """Publish every new complete checkpoint of a folder: run-step, step-N, checkpoint-N; the newest first.

    With --once the exit code is 0 if one was published or nothing newer is there, and 1 if what is newer is not whole.
    """
    from updater.cli import views
    from updater.cli import watch as watching

    with errors_shown(as_json), client_of(url) as client:
        look = watching.Watch(
            directory, client, marker=marker, settle_s=settle, policy=policy, new_run=new_run, told=views.passed_over
        )
        if not once:
            watching.run(look, every, as_json=as_json)
        elif (receipt := watching.look_once(look, settle)) is not None:
            finish(receipt, as_json)
        elif look.left or look.waiting:
            raise typer.Exit(Exit.REFUSED)


@app.command()
@takes_policy(*OF_A_ROLLBACK)
def rollback(
    policy: dict[str, Any],
    to: Annotated[str | None, typer.Option(help="Default: what the fleet offers.")] = None,
    live: Annotated[str | None, typer.Option(help="Refuse unless this version is live; default: what is.")] = None,
    url: Url = DEFAULT_URL,
    commit: Annotated[CommitMode, typer.Option(help="Manual: wait for `liveweights commit ID`.")] = CommitMode.AUTO,
    as_json: Json = False,
) -> None:
    """Bring the previous version back."""
    from trainer_side.client.protocol import fresh_id
    from updater.cli import views

    name = fresh_id("rollback")
    with errors_shown(as_json), client_of(url) as client:
        if commit is CommitMode.MANUAL:
            views.err.print(f"{name} waits for: liveweights commit {name}", markup=False, highlight=False)
        finish(client.rollback(to, live, id=name, policy=policy | {"commit": commit.value}), as_json)


@app.command()
def commit(id: Annotated[str, typer.Argument(help="Of the update.")], url: Url = DEFAULT_URL) -> None:
    """Publish an update that was begun with a manual commit, once every rank has voted for it."""
    with errors_shown(False), client_of(url) as client:
        said(client.commit(id))


@app.command()
def abort(id: Annotated[str, typer.Argument(help="Of the update.")], url: Url = DEFAULT_URL) -> None:
    """End an update that is not decided yet; what is live stays live."""
    with errors_shown(False), client_of(url) as client:
        said(client.abort(id))


@app.command()
def status(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """What is live, what a rollback would bring back, and every member."""
    from updater.cli import views

    with errors_shown(as_json), client_of(url) as client:
        version, fleet = client.version(), client.fleet()
        if as_json:
            views.print_json({"version": version.model_dump(mode="json"), "fleet": fleet.model_dump(mode="json")})
        else:
            views.status(version, fleet)


@app.command()
def history(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20, url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Past receipts, newest first."""
    from updater.cli import views

    with errors_shown(as_json), client_of(url) as client:
        receipts = client.history(limit)
        if as_json:
            views.print_json([one.model_dump(mode="json") for one in receipts])
        else:
            views.history(receipts)


@app.command()
def adopt(
    front: Annotated[
        list[str] | None, typer.Argument(help="NAME=URL of every replica; default: those that call and are no members.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Let a coordinator whose journal is empty or behind take over a fleet that serves. Ends the one before it."""
    from updater.cli import views

    with errors_shown(as_json), client_of(url) as client:
        named = dict(named_url(text) for text in front or ())
        fleet = client.adopt(named or {each.replica: each.url for each in client.fleet().strangers})
        if as_json:
            views.print_json(fleet.model_dump(mode="json"))
        else:
            views.status(client.version(), fleet)


@app.command()
def readmit(
    url: Annotated[str, typer.Argument(help="The replica, not the coordinator.")],
    as_json: Json = False,
) -> None:
    """Take a quarantined replica back if all its ranks prove one version; it joins again."""
    from trainer_side.client.client import address
    from updater.cli import replica

    with errors_shown(as_json):
        replica.run(address(url), "readmit", {}, as_json=as_json)


@app.command()
def release(
    url: Annotated[str, typer.Argument(help="The replica, not the coordinator.")],
    to: Annotated[ReleaseTo, typer.Option(help="What is installed, or what served before it.")],
    as_json: Json = False,
) -> None:
    """Open a replica by hand that has installed and whose coordinator does not come back. Recorded in its status."""
    from trainer_side.client.client import address
    from updater.cli import replica

    with errors_shown(as_json):
        replica.run(address(url), "release", {"to": to.value}, as_json=as_json)


@app.command()
def manifest(
    directory: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    check: Annotated[bool, typer.Option(help="Compare with the manifest that is there; write nothing.")] = False,
    layout: Layouts = None,
    as_json: Json = False,
) -> None:
    """Write liveweights.manifest.json with the digest of every tensor beside a checkpoint."""
    from updater.cli import views

    with errors_shown(as_json):
        made = check_manifest(directory) if check else write_manifest(directory, layouts_of(layout))
        summary = {"tensors": len(made.tensors), "manifest_digest": made.digest, "digests": made.has_digests}
        if as_json:
            views.print_json(summary)
        else:
            views.out.print(f"{len(made.tensors)} tensors, manifest {made.digest}")


@app.command()
@takes_policy()
def inspect(
    directory: Annotated[Path, typer.Argument(help="Checkpoint folder or file.")],
    policy: dict[str, Any],
    tp: Annotated[int | None, typer.Option(min=1, help="Also say what a rank of TP=N would read.")] = None,
    against: Annotated[
        str | None, typer.Option(help="URL of a coordinator: would a push to its fleet, by this policy, be refused?")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="With --against: that would be pushed; default: the next.")
    ] = None,
    new_run: Annotated[bool, typer.Option(help="With --against: as of a push.")] = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="With --against: read no tensor, and judge no values.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Files, tensors, bytes, dtypes, and every fault with its place. Exit code 1 if a push would be refused."""
    from updater.cli import against as comparing
    from updater.cli import inspect

    with errors_shown(as_json):
        if against is None:
            raise typer.Exit(Exit.REFUSED if inspect.run(directory, tp, as_json=as_json) else Exit.OK)
        with client_of(against) as client:
            asked = comparing.PlannedPush(against, version, policy | {"new_run": new_run}, headers)
            faulty = inspect.run(directory, tp, as_json=as_json, against=(client, asked))
        raise typer.Exit(Exit.REFUSED if faulty else Exit.OK)


@app.command()
def demo(
    report: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("demo-report.json"),
    keep: Annotated[bool, typer.Option(help="Leave checkpoints, journal and logs where they are.")] = False,
) -> None:
    """Two live replicas, five publications under load, bad checkpoints, a rollback. Exit code 1 on any mixed reply."""
    from updater.demo import main as show

    raise typer.Exit(Exit.OK if show.run(report, keep=keep) else Exit.REFUSED)


def main() -> None:
    """Entry point of the `liveweights` command."""
    app()


if __name__ == "__main__":
    main()
