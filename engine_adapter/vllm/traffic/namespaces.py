"""The namespace of the keys of cached blocks: one in which the version that is served has made them all (I5)."""

from __future__ import annotations

from collections import deque
from uuid import uuid4

#: So many are remembered. Only what was served last, or just before, can be served again under its name.
_REMEMBERED = 64


class Namespaces:
    """`current`: of new requests; empty until something is served."""

    def __init__(self) -> None:
        self.current = ""
        self._mixed: deque[str] = deque(maxlen=_REMEMBERED)

    def switch(self, name: str, *, keep: bool, shared: bool) -> None:
        """Another version, or the same one again, is about to be served. `name`: of its blocks, equal on every replica.

        `keep`: its requests go on in the namespace of what was served before. `shared`: requests that were in flight
        do. Either leaves blocks there that the version of that name did not make, so it is never entered again.
        """
        if self.current and (keep or shared):
            self._mixed.append(self.current)
        if not keep:
            self.current = f"{name}:{uuid4().hex}" if name in self._mixed else name
