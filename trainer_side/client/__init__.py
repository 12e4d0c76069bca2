"""What asks a coordinator: `protocol` without IO, the two clients of it, and one update from begin to end.

`protocol`, `client`, `handle` and `request` import no torch; `session` and `packing` send tensors. Must never know
`publishing` and `ranks`.
"""
