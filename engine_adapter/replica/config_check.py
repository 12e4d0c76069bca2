"""A source's config, tokenizer and quantisation held against those that the engine runs on, while planning."""

from __future__ import annotations

from engine_adapter.rank.messages import Hello
from updater.core.errors import Rejected, refuse
from updater.core.participant import NOT_COMPARED, Compared, PlanRequest
from updater.protocol.model_document import ModelDocument, compare


def check_config(
    theirs: ModelDocument | None, hellos: tuple[Hello, ...], request: PlanRequest
) -> tuple[tuple[str, ...], Compared]:
    """(warnings, what was compared). None: what comes was compared when it was published first.

    Raises Rejected: `config_mismatch` with every key, `config_required`.
    """
    if theirs is None:
        return (), NOT_COMPARED
    found = compare(theirs, hellos[0].model or ModelDocument(), request.allow_config)
    if found.refused:
        raise Rejected(*found.refused)
    if request.require_config and found.compared.config != "engine":
        side = "source" if theirs.config is None else "engine"
        raise refuse("config_required", f"the policy requires a config that is compared, and the {side} has none")
    return found.warnings, found.compared
