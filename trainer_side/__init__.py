"""The trainer's side: `push(weights, version)` and the client behind it.

May import `transports` and, of `updater`, only `core`, `schemas`, `manifest`, `names` and `wire`.
"""
