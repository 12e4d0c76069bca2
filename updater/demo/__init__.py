"""`liveweights demo`: a fleet of real processes, streaming clients, and the verdict over every reply."""
