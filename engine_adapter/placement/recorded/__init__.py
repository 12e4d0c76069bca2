"""Placement by watching: an engine's own loaders run on a model without memory, and what they copy is written down."""
