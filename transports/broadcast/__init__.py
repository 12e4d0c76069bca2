"""Weights sent to every rank at once over a process group of their own.

What is agreed travels as JSON over one TCP connection per receiver; only bucket bytes travel in the group. May import
what `transports` may. Must never use a default process group.
"""

from transports.broadcast.receiver import BroadcastHub
from transports.broadcast.sender import BroadcastSender

__all__ = ["BroadcastHub", "BroadcastSender"]
