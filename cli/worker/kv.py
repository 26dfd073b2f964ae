"""Keys and values of one sequence, kept by the sequence and by nobody else."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CAPACITY = 32

Block = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values [kv heads, tokens, head size] of some tokens, a pair a layer."""


class KeyValues:
    """Grows by `extend` during a forward and by `commit` after it; a forward that fails leaves it as it was.

    Attributes:
        length: tokens that are in.
    """

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Allocated, room to grow included."""
        return sum(k.nbytes + v.nbytes for k, v in self._layers.values())

    def extend(self, layer: int, k_HND: Tensor, v_HND: Tensor) -> tuple[Tensor, Tensor]:
        """Puts those of N new tokens behind the committed ones; returns all of them, [kv heads, length + N, size]."""
        keys, values = self._room(layer, k_HND, v_HND)
        stop = self.length + k_HND.shape[1]
        keys[:, self.length : stop] = k_HND
        values[:, self.length : stop] = v_HND
        return keys[:, :stop], values[:, :stop]

    def commit(self, tokens: int) -> None:
        """The forward went well: what it put behind is in."""
        self.length += tokens

    def copy_out(self, start: int, stop: int) -> Block:
        """A copy of the tokens [start, stop), which must be in."""
        assert stop <= self.length
        pairs = (self._layers[layer] for layer in sorted(self._layers))
        return tuple((k[:, start:stop].clone(), v[:, start:stop].clone()) for k, v in pairs)

    def copy_in(self, block: Block) -> None:
        """Puts a copied block behind the tokens that are in."""
        for layer, (k, v) in enumerate(block):
            self.extend(layer, k, v)
        self.commit(block[0][0].shape[1])

    def free(self) -> None:
        """Lets go of everything. Idempotent."""
        self.length = 0
        self._layers = {}

    def _room(self, layer: int, k_HND: Tensor, v_HND: Tensor) -> tuple[Tensor, Tensor]:
        wanted = self.length + k_HND.shape[1]
        held = self._layers.get(layer)
        if held is not None and held[0].shape[1] >= wanted:
            return held
        capacity = max(wanted, FIRST_CAPACITY, 2 * held[0].shape[1] if held else 0)
        old = held or (k_HND[:, :0], v_HND[:, :0])
        grown = (_grown(old[0], k_HND, capacity, self.length), _grown(old[1], v_HND, capacity, self.length))
        self._layers[layer] = grown
        return grown


def _grown(old: Tensor, like: Tensor, capacity: int, length: int) -> Tensor:
    room: Tensor = torch.empty(like.shape[0], capacity, like.shape[2], dtype=like.dtype, device=like.device)
    room[:, :length] = old[:, :length]
    return room
