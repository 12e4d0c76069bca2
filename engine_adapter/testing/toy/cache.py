"""A prefix cache of whole blocks in several tiers, whose keys carry a namespace (invariants I3, I5)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

import torch

from updater.core.policy import CachePolicy

#: Keys and values of one block, per layer: two float64 tensors [block_size, kv_heads, head_dim].
Block = tuple[tuple[torch.Tensor, torch.Tensor], ...]
_Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """Blocks evicted from one tier move to the next; a hit in a lower tier moves the block up again.

    Namespaces are small integers behind labels `version+digest`, so that three rules hold: after `reset` a namespace
    is new; after `namespace` equal labels mean equal weights; after `keep` the current one goes on, but no label leads
    to it any more, because it now holds blocks of two versions. Without `namespaced` there is one namespace for ever
    and only a true reset protects.
    """

    def __init__(self, tiers: Sequence[str], blocks: int, block_size: int, namespaced: bool) -> None:
        self.block_size = block_size
        self._capacity = blocks
        self._namespaced = namespaced
        self._tiers: dict[str, OrderedDict[_Key, Block]] = {tier: OrderedDict() for tier in tiers}
        self._numbers = count(1)
        self._labels: dict[str, int] = {}
        self.namespace = 0

    def enter(self, version: str, digest: str, policy: CachePolicy) -> None:
        """The point at which label, bytes and namespace change."""
        if not self._namespaced:
            return
        label = f"{version}+{digest}"
        if policy is CachePolicy.KEEP:
            self._labels = {known: number for known, number in self._labels.items() if number != self.namespace}
            return
        if policy is CachePolicy.RESET or label not in self._labels:
            self._labels[label] = next(self._numbers)
        self.namespace = self._labels[label]

    def lookup(self, tokens: Sequence[int]) -> list[Block]:
        """The longest run of cached blocks at the start of `tokens`, leaving at least one token to compute."""
        found: list[Block] = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self._get((self.namespace, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, tokens: Sequence[int], block: Block) -> None:
        """`block` holds the keys and values of the last `block_size` of `tokens`, given all before them."""
        self._put((self.namespace, tuple(tokens)), block, list(self._tiers))

    def clear(self, refuse: str = "", lie: str = "") -> dict[str, bool]:
        """Tier -> whether it is empty now. `refuse`: a tier that stays full and says so; `lie`: one that does not."""
        for tier, blocks in self._tiers.items():
            if tier not in (refuse, lie):
                blocks.clear()
        return {tier: tier != refuse for tier in self._tiers}

    def sizes(self) -> dict[str, int]:
        """Tier -> blocks that it holds."""
        return {tier: len(blocks) for tier, blocks in self._tiers.items()}

    def _get(self, key: _Key) -> Block | None:
        for blocks in self._tiers.values():
            if key in blocks:
                block = blocks.pop(key)
                self._put(key, block, list(self._tiers))
                return block
        return None

    def _put(self, key: _Key, block: Block, tiers: list[str]) -> None:
        if not tiers:
            return
        blocks = self._tiers[tiers[0]]
        blocks[key] = block
        blocks.move_to_end(key)
        if len(blocks) > self._capacity:
            self._put(*blocks.popitem(last=False), tiers[1:])
