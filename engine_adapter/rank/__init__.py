"""The process of one rank: its plan, its spare, the verbs it obeys, and the channel it hears them on.

`main` is the process, `agent` the verbs (`staging` while the engine serves, `install` while it is paused), `messages`
and `channel` what a front says. May import `engine_adapter.base`, `engine_adapter.placement` and
`transports`; must never know of a coordinator, of leases or of other ranks.
"""
