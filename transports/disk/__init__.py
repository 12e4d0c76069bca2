"""Tensors in safetensors files: found, checked, planned and read region by region; manifests beside them."""
