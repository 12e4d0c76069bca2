"""The HTTP face of a coordinator."""
