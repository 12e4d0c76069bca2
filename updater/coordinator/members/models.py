"""What the members' engines run on, beside tensors: held against each other when one joins, and shown before a push."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from updater.coordinator.members.directory import MemberDirectory
from updater.core.dtypes import differing, fingerprint
from updater.core.errors import Failure, Rejected, Unavailable
from updater.core.fleet.state import Fleet
from updater.core.participant import Description, same_definition
from updater.protocol import wire
from updater.protocol.answers import DtypesState
from updater.protocol.model_config import ConfigRefused
from updater.protocol.model_document import ModelDocument, compare

_log = logging.getLogger("liveweights.coordinator")
_SIDES = ("in this replica", "in replica {}")
_HINT = "start it from the same model folder and with the same overrides as the fleet, or give it a fleet of its own"


def document_of(description: Description | None) -> ModelDocument | None:
    """None where it says none, or none that can be read."""
    if description is None or not description.document:
        return None
    try:
        found = wire.decode(ModelDocument, description.document)
        found.check()
    except (wire.WireError, ConfigRefused):
        return None
    return found


class Models:
    """Asks what is not known yet, of members that a restarted coordinator has not seen described. Decides nothing."""

    def __init__(self, directory: MemberDirectory, seconds: float) -> None:
        self._directory, self._seconds = directory, seconds

    async def of_fleet(self, state: Fleet, without: str = "") -> tuple[str, ModelDocument] | None:
        """(replica, document) of the first member that says one: all members run on the same."""
        others = [member for member in state.members if member.replica != without]
        for member in sorted(others, key=lambda each: each.shut):
            handle = self._directory.get(member.replica)
            said = await self._directory.described(handle, self._seconds) if handle is not None else None
            document = document_of(said)
            if document is not None:
                return member.replica, document
        return None

    async def differs(self, state: Fleet, joiner: Description) -> tuple[Failure, ...] | None:
        """Why `joiner` cannot be of this fleet: every key in which its config, tokenizer or quantisation is not that of
        the others. None: it could not be compared, and the hashes have to do.
        """
        replica, mine = joiner.status.replica, document_of(joiner)
        other = await self.of_fleet(state, without=replica)
        if mine is None or other is None:
            self._warn(state, joiner)
            return None
        sides = (_SIDES[0], _SIDES[1].format(other[0]))
        found = compare(mine, other[1], sides=sides)
        for text in found.warnings:
            _log.warning("%s joins: %s", replica, text)
        return tuple(replace(failure, replica=replica, hint=_HINT) for failure in found.refused)

    def _warn(self, state: Fleet, joiner: Description) -> None:
        mine, replica = joiner.config_hash, joiner.status.replica
        others = {member.config_hash for member in state.members if member.replica != replica} - {""}
        if not others:
            return
        if any(same_definition(mine, other) for other in others):
            text = (
                "%s joins: its config is compared by its hash alone, its tokenizer not at all: no member says its own"
            )
            _log.warning(text, replica)
        else:
            text = "%s joins: its config is not compared with the fleet's (%s, and %s)"
            _log.warning(text, replica, mine[:16] or "none", min(others)[:16])


_BY_HAND = 'pass the dtypes yourself: dtypes={"*": "BF16"}'


def dtypes_of(said: Mapping[str, Description | None]) -> DtypesState:
    """`said`: by replica, None for one that has not been asked yet. Raises Rejected with every difference, and
    Unavailable where no member can say.
    """
    told = {replica: description for replica, description in said.items() if description is not None}
    if not told:
        raise Unavailable(Failure("no_members", "no replica says which dtypes it holds"))
    silent = [replica for replica in said if replica not in told]
    if silent:
        raise Unavailable(*(Failure("shut", "it has not said yet what it holds", replica=each) for each in silent))
    (first, pattern), *others = told.items()
    failures = [
        Failure("mode_unsupported", "does not know the dtypes that it holds", replica=replica, hint=_BY_HAND)
        for replica, description in told.items()
        if not description.dtypes
    ]
    failures += [
        Failure("tensor_dtype", f"{first} holds it in another dtype", replica=replica, tensor=name, hint=_BY_HAND)
        for replica, description in others
        for name in differing(pattern.dtypes, description.dtypes)
        if not failures
    ]
    if failures:
        raise Rejected(*failures)
    return DtypesState(fingerprint=fingerprint(pattern.dtypes), dtypes=dict(pattern.dtypes), replicas=sorted(told))
