"""Placement: which region of which checkpoint tensor goes to which region of which parameter of one rank.

`rows` is the value. The room `declared` makes one by rules (`names` says which part of which parameter a tensor is,
`layouts` and `cutting` which piece of it lies here), the room `recorded` by watching an engine's own loaders.
`coverage` proves one; `regions` are its views; `atoms` adds up what all ranks hold. Nothing here knows of updates,
engines or files.
"""
