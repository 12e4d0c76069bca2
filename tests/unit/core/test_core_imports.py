"""The core is standard library only, and stays importable where there is neither torch nor an event loop."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import updater.core

SCRIPT = """
import sys
before = set(sys.modules)
for name in sys.argv[1:]:
    __import__(name)
ours = {name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}
print(*sorted(ours))
print(*(name for name in ("asyncio", "torch", "pydantic", "multiprocessing", "threading") if name in sys.modules))
"""


def test_importing_the_core_loads_nothing_but_itself() -> None:
    names = [module.name for module in pkgutil.walk_packages(updater.core.__path__, "updater.core.")]
    assert len(names) > 15
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, check=True, timeout=200
    )
    ours, unwanted = done.stdout.split("\n")[:2]
    assert {name for name in ours.split() if name != "updater" and not name.startswith("updater.core")} == set()
    assert "asyncio" not in unwanted
    assert "torch" not in unwanted
    assert "multiprocessing" not in unwanted
