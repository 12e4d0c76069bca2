"""Reload mode: publication by vLLM's own reload from disk, where our ranks are not in its workers."""
