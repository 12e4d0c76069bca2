"""Moving tensor bytes: sources that can be read region by region, and the digest that proves them.

May import torch, `updater.core` and `updater.protocol`. Must never know of engines, phases or versions.
"""
