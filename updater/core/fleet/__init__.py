"""The coordinator's state machine: one update at a time over all replicas, from begin to recovery. Pure."""
