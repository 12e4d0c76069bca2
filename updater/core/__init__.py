"""The transaction as data: versions, policies, errors, messages, the two state machines and recovery.

Standard library only: no clock, no IO, no torch, no asyncio. Same state and same event give the same next state
and the same effects. Nothing here may import another package of ours.
"""
