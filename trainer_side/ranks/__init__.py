"""Ranks of a trainer that push together: what they agree on, and a source that all of them iterate in step."""
