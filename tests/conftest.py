"""Property tests draw the same examples in every run; `make soak` draws new ones, and more of them."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("soak", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("LIVEWEIGHTS_EXAMPLES", "repeatable"))
