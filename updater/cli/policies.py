"""What a publication may be asked for on the command line: one definition, for every command that publishes or looks.

`takes_policy` puts the options of `policy_of`, or some of them, into a command that has a parameter `policy`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from updater.core.policy import CachePolicy, InFlight, InstallMode, OnBusy, SourceLayout

#: How typer's help groups them.
PANEL = "Policy of the publication"


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PANEL, **more)


Suspicious = Annotated[
    list[str] | None,
    _option("--allow-suspicious", help="Pattern of tensors that may hold no normal number; repeatable."),
]
Layouts = Annotated[
    list[str] | None,
    _option("--layout", help="How tensors lie that hold several, PATTERN=KIND; repeatable: docs/checkpoints.md."),
]
#: Of what this process sends itself.
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtypes",
        help="With a --transport that sends: the DTYPE to round to, PATTERN=DTYPE (repeatable), or `engine`: what the "
        "fleet holds.",
    ),
]


def policy_of(
    in_flight: Annotated[InFlight, _option(help="What happens to running requests.")] = InFlight.DRAIN,
    cache: Annotated[CachePolicy, _option(help="What happens to cached keys and values.")] = CachePolicy.RESET,
    install: Annotated[InstallMode, _option(help="How new bytes become live.")] = InstallMode.AUTO,
    on_busy: Annotated[OnBusy, _option(help="If another update is under way.")] = OnBusy.REFUSE,
    narrow: Annotated[list[str] | None, _option(help="Allow narrowing SOURCE:PARAMETER, as F32:BF16.")] = None,
    require_digests: Annotated[bool, _option(help="Refuse a checkpoint without a manifest of digests.")] = False,
    allow_nonfinite: Annotated[bool, _option(help="Accept NaN and infinity.")] = False,
    allow_suspicious: Suspicious = None,
    layout: Layouts = None,
    require_config: Annotated[bool, _option(help="Refuse a config that cannot be compared.")] = False,
    allow_config: Annotated[
        list[str] | None,
        _option(help="Key of the config in which it may differ from the engine; repeatable."),
    ] = None,
    deadline: Annotated[float, _option(min=0.1, help="Seconds until it must be ready to commit.")] = 600.0,
    quiesce: Annotated[float, _option(min=0.1, help="Seconds that one try waits for running requests.")] = 30.0,
    pause_lease: Annotated[float, _option(min=0.1, help="Seconds that a replica stays shut unheard.")] = 30.0,
    attempts: Annotated[int, _option(min=1, max=10, help="Tries at pausing the fleet.")] = 3,
) -> dict[str, Any]:
    """The `policy` of a request's body: one field for each option, in their order."""
    return {
        "in_flight": in_flight.value,
        "cache": cache.value,
        "install": install.value,
        "on_busy": on_busy.value,
        "allow_narrowing": [_pair(text) for text in narrow or ()],
        "require_digests": require_digests,
        "allow_nonfinite": allow_nonfinite,
        "allow_suspicious": list(allow_suspicious or ()),
        "layouts": {glob: kind.value for glob, kind in layouts_of(layout)},
        "require_config": require_config,
        "allow_config": list(allow_config or ()),
        "deadline_s": deadline,
        "quiesce_s": quiesce,
        "pause_lease_s": pause_lease,
        "attempts": attempts,
    }


#: Options of a publication that reads nothing.
OF_A_ROLLBACK = ("in_flight", "cache", "on_busy", "deadline", "quiesce", "pause_lease", "attempts")
Command = Callable[..., None]


def takes_policy(*only: str) -> Callable[[Command], Command]:
    """A command with the options of `policy_of` in place of its parameter `policy`. `only`: these of them; all if none
    is named.
    """
    return lambda command: _with_policy(command, only)


def _with_policy(command: Command, only: Sequence[str]) -> Command:
    own = inspect.signature(command, eval_str=True).parameters.values()
    every = inspect.signature(policy_of, eval_str=True).parameters
    shared = {name: option for name, option in every.items() if not only or name in only}
    if clash := [each.name for each in own if each.name in shared]:
        raise TypeError(f"{command.__name__} has options of its own that belong to the policy: {clash}")
    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in shared.values()]
    before = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own if each.name != "policy"]

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in shared if name in given}
        fields = zip(every, policy_of(**chosen).items(), strict=True)
        command(**given, policy=dict(field for option, field in fields if option in shared))

    made = inspect.Signature([*before, *options])
    run.__signature__ = made  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in made.parameters.items()}
    return run


def layouts_of(texts: Sequence[str] | None) -> list[tuple[str, SourceLayout]]:
    """PATTERN=KIND each."""
    return [_layout(text) for text in texts or ()]


def dtypes_of(texts: Sequence[str] | None) -> str | dict[str, str] | None:
    """As `push(dtypes=...)` takes it."""
    if not texts:
        return None
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    rules = {}
    for text in texts:
        pattern, mark, dtype = text.rpartition("=")
        if not mark or not pattern or not dtype:
            raise typer.BadParameter(f"{text!r} is not PATTERN=DTYPE, for example *.router.weight=F32")
        rules[pattern] = dtype
    return rules


def _pair(text: str) -> list[str]:
    source, _, parameter = text.partition(":")
    if not source or not parameter:
        raise typer.BadParameter(f"{text!r} is not SOURCE:PARAMETER, for example F32:BF16")
    return [source.upper(), parameter.upper()]


def _layout(text: str) -> tuple[str, SourceLayout]:
    glob, _, kind = text.rpartition("=")
    if not glob or kind not in tuple(SourceLayout):
        kinds = ", ".join(SourceLayout)
        raise typer.BadParameter(f"{text!r} is not PATTERN=KIND with a kind of {kinds}")
    return glob, SourceLayout(kind)
