"""Which dtypes a whole fleet holds, from what its replicas say of themselves."""

from __future__ import annotations

from collections.abc import Mapping

from updater.core.dtypes import differing, fingerprint
from updater.core.errors import Failure, Rejected, Unavailable
from updater.core.participant import Description
from updater.schemas import DtypesState

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
