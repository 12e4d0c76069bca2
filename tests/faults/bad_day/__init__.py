"""The bad day with real processes: a seeded driver over a live fleet, and the judge of what it leaves.

`python -m tests.faults.bad_day --seed 1 --rounds 10` runs it by hand. A round does one or two bad things at a random
moment of a random phase of an update, mends what an operator would mend, waits until the fleet rests, and judges.

`engines` what is served and what it must say; `programs` the processes; `relay` the network between them; `fleet`
their lives; `load` clients that stream; `publisher` the trainer; `actions` the bad things and the refusals that each
may give; `rounds` one round after the other; `judge` the verdict, from plain values; `results` the table over runs.
"""
