"""The toy engine's prefix cache: namespaces, tiers, and what each policy does to them."""

from __future__ import annotations

import torch

from engine_adapter.testing.toy.cache import Block, PrefixCache
from updater.core.policy import CachePolicy

OLD, NEW = ("0-7", "d7"), ("0-8", "d8")


def block(value: float) -> Block:
    return ((torch.full((2, 1, 4), value, dtype=torch.float64), torch.zeros(2, 1, 4, dtype=torch.float64)),)


def value(cache: PrefixCache, tokens: list[int]) -> list[float]:
    return [float(found[0][0][0, 0, 0]) for found in cache.lookup(tokens)]


def cache_with(tokens: list[int], number: float, *, namespaced: bool = True, blocks: int = 8) -> PrefixCache:
    cache = PrefixCache(("device", "host"), blocks, 2, namespaced)
    cache.enter(*OLD, CachePolicy.RESET)
    cache.insert(tokens, block(number))
    return cache


def test_a_hit_needs_every_token_before_the_block_and_leaves_one_to_compute() -> None:
    cache = cache_with([1, 2], 7.0)
    assert value(cache, [1, 2, 3]) == [7.0]
    assert value(cache, [1, 2]) == []
    assert value(cache, [9, 2, 3]) == []


def test_namespace_hides_blocks_of_another_version_and_finds_them_again_after_a_rollback() -> None:
    cache = cache_with([1, 2], 7.0)
    cache.enter(*NEW, CachePolicy.NAMESPACE)
    assert value(cache, [1, 2, 3]) == []
    cache.insert([1, 2], block(8.0))
    cache.enter(*OLD, CachePolicy.NAMESPACE)
    assert value(cache, [1, 2, 3]) == [7.0]


def test_equal_labels_with_other_digests_are_other_namespaces() -> None:
    cache = cache_with([1, 2], 7.0)
    cache.enter(OLD[0], "repaired", CachePolicy.NAMESPACE)
    assert value(cache, [1, 2, 3]) == []


def test_keep_goes_on_with_old_blocks_but_no_label_leads_back_to_the_mixture() -> None:
    cache = cache_with([1, 2], 7.0)
    cache.enter(*NEW, CachePolicy.KEEP)
    assert value(cache, [1, 2, 3]) == [7.0]
    for label in (OLD, NEW):
        cache.enter(*label, CachePolicy.NAMESPACE)
        assert value(cache, [1, 2, 3]) == []


def test_after_reset_a_label_never_leads_to_what_an_uncleared_tier_still_holds() -> None:
    cache = cache_with([1, 2], 7.0)
    cache.enter(*NEW, CachePolicy.RESET)
    cache.enter(*OLD, CachePolicy.RESET)
    assert value(cache, [1, 2, 3]) == []


def test_without_namespaces_only_a_true_clear_protects() -> None:
    cache = cache_with([1, 2], 7.0, namespaced=False)
    cache.enter(*NEW, CachePolicy.RESET)
    assert value(cache, [1, 2, 3]) == [7.0]
    assert cache.clear() == {"device": True, "host": True}
    assert value(cache, [1, 2, 3]) == []


def test_blocks_fall_to_the_next_tier_and_come_back_on_a_hit() -> None:
    cache = cache_with([1, 2], 1.0, blocks=1)
    cache.insert([3, 4], block(2.0))
    assert cache.sizes() == {"device": 1, "host": 1}
    assert value(cache, [1, 2, 5]) == [1.0]
    assert value(cache, [3, 4, 5]) == [2.0]
    cache.insert([5, 6], block(3.0))
    assert cache.sizes() == {"device": 1, "host": 1}


def test_a_refusing_tier_is_named_and_a_lying_one_is_not() -> None:
    cache = cache_with([1, 2], 1.0, blocks=1)
    cache.insert([3, 4], block(2.0))
    assert cache.clear(refuse="host") == {"device": True, "host": False}
    assert cache.sizes() == {"device": 0, "host": 1}
    assert cache.clear(lie="host") == {"device": True, "host": True}
    assert cache.sizes() == {"device": 0, "host": 1}
