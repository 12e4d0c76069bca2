"""Placement: which region of which checkpoint tensor goes to which region of which parameter of one rank.

`rows` is the value; `declared` and `dtensor` make one (`names` says which part of which parameter a tensor is,
`layouts` and `cutting` which piece of it lies here); `coverage` proves one; `regions` are its views; `atoms` adds up
what all ranks hold. Nothing here knows of updates, engines or files.
"""
