"""The replicas of a fleet as the coordinator knows them: joins, probes, calls, what their engines run on."""
