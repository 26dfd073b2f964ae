"""Sorted by digest, equal ones summed, zero weights dropped (ARCHITECTURE, Vocabulary); and the prefix key (I11)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterd.gpu_cache.composition import Component, normalise, parse_wish, prefix_key, total_rank
from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.identity import BasePin, VersionKey
from fakes.adapters import MemoryLoader

PIN = BasePin("base", "a" * 40, "b" * 64)


def key(digest: str) -> VersionKey:
    return VersionKey("acme", PIN, digest)


WEIGHTS = st.floats(-1e6, 1e6, allow_nan=False)
PARTS = st.lists(st.tuples(st.sampled_from([key(d) for d in "abcd"]), WEIGHTS), max_size=6)


@given(PARTS, st.randoms())
def test_the_order_in_which_it_was_asked_does_not_matter(parts: list[tuple[VersionKey, float]], random: object) -> None:
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    components = normalise(parts)
    assert normalise(shuffled) == components
    assert [c.key.digest for c in components] == sorted({c.key.digest for c in components})
    assert all(c.weight for c in components)
    assert normalise((c.key, c.weight) for c in components) == components


def test_equal_ones_are_summed_and_zero_is_dropped() -> None:
    parts = [(key("b"), 0.1), (key("a"), 1.0), (key("b"), 0.2), (key("a"), -1.0), (key("c"), -0.0)]
    assert normalise(parts) == (Component(key("b"), 0.1 + 0.2),)


def test_a_sum_must_be_finite() -> None:
    with pytest.raises(AdapterdError) as refused:
        normalise([(key("a"), 3e38), (key("a"), 3e38)])
    assert refused.value.code is Code.COMPOSITION_INVALID


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -float("inf"), 3.5e38, -1e39, 10**400, "1", None, True])
def test_weights_must_be_finite_numbers(weight: object) -> None:
    with pytest.raises(AdapterdError) as refused:
        parse_wish([("acme/a", weight)], 4)  # type: ignore[list-item]
    assert refused.value.code is Code.COMPOSITION_INVALID


def test_there_is_a_cap_on_components() -> None:
    assert len(parse_wish([("acme/a", 1.0)] * 4, 4)) == 4
    with pytest.raises(AdapterdError) as refused:
        parse_wish([("acme/a", 1.0)] * 5, 4)
    assert refused.value.code is Code.COMPOSITION_INVALID


def test_the_rank_of_a_module_is_summed() -> None:
    loader = MemoryLoader()
    manifests = [loader.publish(f"acme/a{rank}", rank=rank).manifest for rank in (3, 5, 8)]
    assert total_rank(manifests) == 16
    assert total_rank([]) == 0


def test_prefix_keys_differ_where_outputs_may() -> None:
    a, b = Component(key("a" * 64), 1.0), Component(key("b" * 64), 1.0)
    cases = [
        ("acme", PIN, ()),
        ("blue", PIN, ()),
        ("acme", BasePin("base", "c" * 40, "b" * 64), ()),
        ("acme", BasePin("base2", "a" * 40, "b" * 64), ()),
        ("acme", BasePin("base", "a" * 40, "d" * 64), ()),
        ("acme", PIN, (a,)),
        ("acme", PIN, (b,)),
        ("acme", PIN, (a, b)),
        ("acme", PIN, (Component(a.key, 0.1),)),
        ("acme", PIN, (Component(a.key, 0.1 + 2e-17),)),
        ("acme", PIN, (Component(a.key, 0.30000000000000004),)),
        ("acme", PIN, (Component(a.key, 0.3),)),
    ]
    assert len({prefix_key(*case) for case in cases}) == len(cases)


def test_a_prefix_key_is_a_list_of_fields_with_their_lengths() -> None:
    fields, rest = [], prefix_key("acme", PIN, (Component(key("a" * 64), -1.0),))
    while rest:
        (length,) = struct.unpack(">Q", rest[:8])
        fields.append(rest[8 : 8 + length])
        rest = rest[8 + length :]
    assert fields == [b"adapterd.prefix/1", b"acme", b"base", b"a" * 40, b"b" * 64, b"a" * 64, b"bff0000000000000"]
