"""When a reply says that it went on from keys of old weights."""

from __future__ import annotations

import pytest

from engine_adapter.replica.replies import stale_prefix


@pytest.mark.case("F08")
def test_only_a_prefix_that_was_cached_in_a_namespace_older_than_the_weights_is_stale() -> None:
    assert stale_prefix(True, 3) == {"stale_prefix": True}
    for stale, cached in ((True, 0), (False, 3), (False, 0)):
        assert stale_prefix(stale, cached) == {}
