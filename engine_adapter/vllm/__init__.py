"""Stock vLLM as an engine: a worker extension for the ranks, an endpoint plugin for the front.

`worker` starts a rank agent over `engine` in every worker process; `plugin` makes the API server process the front,
`gate` lets calls of clients in. `building` makes the second model that placements are recorded on. What is private to
vLLM is listed in `private`. vLLM is imported only inside functions. Nothing here knows of coordinators.
"""
