"""Layers whose weights vLLM processes after a load, updated by private twins of them (docs/vllm-layers.md)."""
