"""Test doubles of the fleet: `Simulation` moves the real machines by hand, `SimulatedReplica` is one member of it.

May import `updater.core` and the participant seam. Nothing in production imports this package.
"""

from updater.testing.replica import SimulatedReplica, Source, Violation
from updater.testing.simulation import Action, Machines, Simulation

__all__ = ["Action", "Machines", "SimulatedReplica", "Simulation", "Source", "Violation"]
