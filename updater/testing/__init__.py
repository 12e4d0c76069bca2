"""Test doubles of the fleet: `Simulation` moves the real machines by hand, `SimulatedReplica` is one member of it.

May import `updater.core` and the participant seam. Nothing in production imports this package.
"""

from updater.testing.replica import SimulatedReplica
from updater.testing.shell import Action, Machines
from updater.testing.simulation import Simulation
from updater.testing.values import Source, Violation

__all__ = ["Action", "Machines", "SimulatedReplica", "Simulation", "Source", "Violation"]
