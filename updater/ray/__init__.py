"""The coordinator and the fronts as Ray actors: calls by handle, and HTTP applications without a socket."""
