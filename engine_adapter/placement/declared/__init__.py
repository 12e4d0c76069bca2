"""Placement by rules: which rows and columns of a checkpoint tensor a rank holds, said by name and layout."""
