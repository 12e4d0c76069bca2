"""One replica's state machine: which verb it takes in which state, and what it answers. Pure: no clock, no IO."""
