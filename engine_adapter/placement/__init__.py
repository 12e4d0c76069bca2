"""Placement: which region of which checkpoint tensor goes to which region of which parameter of one rank.

`rows` is the value; `declared` and `dtensor` make one; `coverage` proves one; `atoms` splits what ranks hold in common.
"""
