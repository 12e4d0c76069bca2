"""The coordinator: membership, the update transaction, the journal, the public HTTP API and the CLI.

`updater.core` is the pure state machine (standard library only): everything may import it, it imports nothing of ours.
`updater.protocol` is what the other packages may import beside it. This package never imports an engine; only the
composition roots (`cli`, `demo`) do.
"""

__version__ = "0.2.0"
