"""All bad things by name. Imported for the sake of the modules that it imports, each of which adds its own."""

from __future__ import annotations

from tests.faults.bad_day import identity
from tests.faults.bad_day.actions import ACTIONS

NAMES = tuple(ACTIONS)
_STARTS = ("kill_front", "kill_rank", "restart_on_another_checkpoint", identity.declared_dead_but_frozen.__name__)
#: Those after which no replica has to be started again, which takes a vLLM the better part of a minute.
QUICK = tuple(name for name in NAMES if name not in _STARTS)
