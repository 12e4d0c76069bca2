"""The process that publishes: it performs what `updater.core` decides. `coordinator` puts the parts together."""
