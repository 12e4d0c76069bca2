"""A toy engine: a small transformer in plain torch with a paged cache, a scheduler, ranks, and faults to order."""
