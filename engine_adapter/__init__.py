"""The engine's side: placement, spare storage, the rank agent, and the front that speaks the participant contract.

May import `transports` and, of `updater`, only `core`, `manifest`, `names` and `wire`. An engine author supplies an
`engine_adapter.base.RankEngine` and knows nothing of transactions.
"""
