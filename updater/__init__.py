"""The coordinator: membership, the update transaction, the journal, the public HTTP API and the CLI.

`updater.core` is the pure state machine (standard library only). Everything here may import it; it imports
nothing of ours. This package never imports an engine; only the composition roots (`cli`) do.
"""

__version__ = "0.2.0"
