"""The prefix cache: what was computed for a prompt's beginning serves the next request with the same beginning.

Whole blocks only. A block's key is the block before it and its own token ids; before the first one stands
`lease.prefix_key()`, so a block is found only under a lease whose outputs are equal (I11): never under another
version, another tenant, another composition or another base.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from adapterd.cli.worker.kv import BLOCK_TOKENS, Block, KeyValues

_Key = tuple[bytes | int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Kept:
    number: int
    block: Block


class PrefixCache:
    """Copies of blocks, the least recently used one dropped first.

    Attributes:
        hits: tokens that were taken from here instead of being computed.

    Args:
        max_blocks: how many are kept; 0 keeps none.
        block_tokens: tokens a block.
    """

    def __init__(self, max_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.hits = 0
        self._max, self._tokens = max_blocks, block_tokens
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._made = 0

    @property
    def blocks(self) -> int:
        """Blocks that are kept."""
        return len(self._kept)

    def fill(self, prefix_key: bytes, tokens: Sequence[int], kv: KeyValues) -> int:
        """Copies what is known of `tokens` into `kv`, which is empty; returns how many tokens that is.

        The last token is never among them: somebody has to compute the logits behind it.
        """
        chain = self._chain(prefix_key, tokens[: len(tokens) - 1])
        for key in chain:
            kv.copy_in(self._kept[key].block)
        self._touch(chain)
        self.hits += kv.length
        return kv.length

    def keep(self, prefix_key: bytes, tokens: Sequence[int], kv: KeyValues) -> None:
        """Keeps the whole blocks of `tokens` that `kv` has and that are not here yet."""
        if self._max == 0:
            return
        tokens = tokens[: kv.length]
        chain = self._chain(prefix_key, tokens)
        parent: bytes | int = self._kept[chain[-1]].number if chain else prefix_key
        for start in range(len(chain) * self._tokens, len(tokens) - self._tokens + 1, self._tokens):
            key = (parent, tuple(tokens[start : start + self._tokens]))
            self._made += 1
            self._kept[key] = _Kept(self._made, kv.copy_out(start, start + self._tokens))
            parent = self._made
            chain.append(key)
        self._touch(chain)
        while len(self._kept) > self._max:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Drops everything."""
        self._kept.clear()

    def _chain(self, prefix_key: bytes, tokens: Sequence[int]) -> list[_Key]:
        """The keys of the known blocks that `tokens` begins with."""
        found: list[_Key] = []
        parent: bytes | int = prefix_key
        for start in range(0, len(tokens) - self._tokens + 1, self._tokens):
            key = (parent, tuple(tokens[start : start + self._tokens]))
            kept = self._kept.get(key)
            if kept is None:
                break
            found.append(key)
            parent = kept.number
        return found

    def _touch(self, chain: Sequence[_Key]) -> None:
        """Last ones first, so that no block goes before those that stand behind it: they would not be found."""
        for key in reversed(chain):
            self._kept.move_to_end(key)
