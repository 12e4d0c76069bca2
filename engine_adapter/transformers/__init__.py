"""The embedded engine: Hugging Face transformers' continuous batching, TP ranks over gloo.

`engine.build` is the factory. May import the transformers library (absolute imports: this folder only shares its
name), torch, `engine_adapter.base`, `engine_adapter.placement`, `updater.core`. Must never know of updates, votes or
coordinators. The library is used through subclasses and public attributes; nothing of it is patched.
"""
