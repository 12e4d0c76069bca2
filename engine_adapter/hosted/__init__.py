"""What an adapter needs of an engine that brings its own server, whichever it is: ranks inside its workers, placements
recorded from its loaders on a second model, and what its HTTP routes ask and answer of versions.

May import `placement`, `rank` and `replica`. Must never know one engine: what does lies beside it (`vllm`).
"""
