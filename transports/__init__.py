"""Moving tensor bytes: sources that can be read region by region, and the digest that proves them.

May import torch, `updater.core`, `updater.manifest`, `updater.names` and `updater.wire`. Must never know of
engines, phases or versions.
"""
