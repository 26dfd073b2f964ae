"""Seals of the store's own bytes: which changes they notice, and that no key and nonce serve two texts."""

from __future__ import annotations

import hashlib
import hmac
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from adapterd.loader.seal import Sealer
from adapterd.loader.store_key import StoreKey

SECRET, SALT = b"k" * 32, "5a" * 32
KEY = StoreKey(SECRET)
DATA = bytes(range(256)) * 40


def tag(data: bytes, number: int = 3, *, key: StoreKey = KEY, about: bytes = b"a version", salt: str = SALT) -> str:
    return Sealer(key, about, salt).tag(number, [memoryview(data)])


def test_a_tag_is_gmac_under_a_key_of_the_seals_own() -> None:
    """By another interface of the library: what an older release kept must hold, or be packed anew for nothing."""
    text = b"adapterd.store-derived/1\nadapterd.seal/1\n" + SALT.encode() + b"\na version"
    own = hmac.digest(SECRET, text, hashlib.sha256)
    assert tag(DATA).encode() == AESGCM(own).encrypt((3).to_bytes(12, "big"), b"", DATA).hex().encode()


@given(data=st.binary(min_size=1, max_size=300), position=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(data: bytes, position: int, bit: int) -> None:
    made, changed = tag(data), bytearray(data)
    changed[position % len(data)] ^= 1 << bit
    sealer = Sealer(KEY, b"a version", SALT)
    assert sealer.holds(3, [memoryview(data)], made)
    assert not sealer.holds(3, [memoryview(changed)], made)


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_a_part_may_lie_in_pieces(data: bytes, cuts: list[int]) -> None:
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [memoryview(data)[begin:end] for begin, end in pairwise(ends)]
    assert Sealer(KEY, b"a version", SALT).tag(3, pieces) == tag(data)


@pytest.mark.parametrize(
    "other",
    [
        tag(DATA, 4),
        tag(DATA, key=StoreKey(b"o" * 32)),
        tag(DATA, about=b"another version"),
        tag(DATA, salt="5b" * 32),
        tag(DATA + b"\0"),
        tag(DATA[:-1]),
        tag(DATA)[:-2],
        "",
        "é" * 32,
    ],
    ids=["number", "key", "about", "salt", "longer", "shorter", "half a tag", "no tag", "no hex"],
)
def test_a_tag_of_something_else_does_not_hold(other: str) -> None:
    sealer = Sealer(KEY, b"a version", SALT)
    assert sealer.holds(3, [memoryview(DATA)], tag(DATA))
    assert not sealer.holds(3, [memoryview(DATA)], other)


def test_each_new_seal_has_a_salt_of_its_own() -> None:
    """GMAC gives itself away where one key and nonce serve two texts: so equal bytes get other tags each time."""
    sealers = [Sealer(KEY, b"a version") for _ in range(50)]
    assert len({sealer.salt for sealer in sealers}) == 50
    assert len({sealer.tag(0, [memoryview(DATA)]) for sealer in sealers}) == 50


def test_a_derived_key_is_neither_the_secret_nor_a_mac() -> None:
    assert len(KEY.derived(b"x")) == 32
    assert KEY.derived(b"x") not in (SECRET, KEY.derived(b"y"), bytes.fromhex(KEY.mac(b"x")))
