"""From a source to a published version: `Pusher`, over a stream or over a folder, now or in the background.

May import every other room of `trainer_side`; none of them imports this one.
"""
