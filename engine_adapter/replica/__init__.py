"""The front process of a replica: one face to the coordinator and to clients, its ranks behind it.

`launch` is the process, `app` its HTTP face, `front` drives the replica machine of `updater.core`, `ranks` are the
child processes and `rank_work` what they do together, `admission` the gate that requests pass, `completions` the
OpenAI-style answers. Loads no torch; must never touch a tensor.
"""
