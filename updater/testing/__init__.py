"""Test doubles of the fleet: `Simulation` moves the real machines by hand, `SimulatedReplica` is one member of it.

`fronts` and `service` are for tests of the shell: fronts on the real replica machine behind real HTTP, and a whole
coordinator on a loopback port. Nothing in production imports this package.
"""

from updater.testing.replica import SimulatedReplica
from updater.testing.simulation import Simulation
from updater.testing.values import Action, Machines, SimulatedSource, Violation

__all__ = ["Action", "Machines", "SimulatedReplica", "SimulatedSource", "Simulation", "Violation"]
