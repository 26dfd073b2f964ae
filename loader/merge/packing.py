"""Small integers in 32-bit words, as GPTQ and AWQ store them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32

Order = tuple[int, ...]
"""Which value stands at each place of a word, lowest bits first."""


def in_order(bits: int) -> Order:
    return tuple(range(WORD_BITS // bits))


AWQ_ORDER: Order = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of 4-bit values: even ones first, for a kernel that takes them two at a time (AutoAWQ, `WQLinear_GEMM`)."""


def unpack_columns(words: NDArray[Any], order: Order) -> NDArray[np.int32]:
    """Words [n, m] as values [n, m · values of a word]."""
    n, m = words.shape
    per = len(order)
    values = np.empty((n, m, per), np.int32)
    for place, index in enumerate(order):
        values[:, :, index] = _at(words, place, per)
    return values.reshape(n, m * per)


def pack_columns(values: NDArray[Any], order: Order) -> NDArray[np.int32]:
    """The inverse of `unpack_columns`."""
    per = len(order)
    split = values.reshape(values.shape[0], -1, per)
    words = np.zeros(split.shape[:2], np.uint32)
    for place, index in enumerate(order):
        words |= split[:, :, index].astype(np.uint32) << np.uint32(place * (WORD_BITS // per))
    return words.view(np.int32)


def unpack_rows(words: NDArray[Any], order: Order) -> NDArray[np.int32]:
    """Words [n, m] as values [n · values of a word, m]."""
    n, m = words.shape
    per = len(order)
    values = np.empty((n, per, m), np.int32)
    for place, index in enumerate(order):
        values[:, index] = _at(words, place, per)
    return values.reshape(n * per, m)


def pack_rows(values: NDArray[Any], order: Order) -> NDArray[np.int32]:
    """The inverse of `unpack_rows`."""
    return pack_columns(np.ascontiguousarray(values.T), order).T


def _at(words: NDArray[Any], place: int, per: int) -> NDArray[Any]:
    bits = WORD_BITS // per
    return (words.view(np.uint32) >> np.uint32(place * bits)) & np.uint32((1 << bits) - 1)
