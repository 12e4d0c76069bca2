"""The engine's side: placement, spare storage, the rank agent, and the front that speaks the participant contract.

May import `transports` and, of `updater`, `core`, `protocol` and `ray`; a front also what it serves HTTP with
(`server.connections`, `guard`, `security`). An engine author supplies an
`engine_adapter.base.RankEngine` and knows nothing of transactions.
"""
