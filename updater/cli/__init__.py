"""The command `liveweights`: `main` has the verbs, the others what they print."""
