"""What the bytes of a stream travel in: groups (gloo, nccl), sealed memory, device memory.

The seam is `transports.stream.medium`. May import what `transports` may. Must never use a default process group.
"""
