"""The written form of a token."""

from __future__ import annotations

import zlib

import pytest

from adapterd.registry.tokens.format import ALPHABET, checksum, new_token, parse_token


def test_shape_and_round_trip() -> None:
    token = new_token("s")
    assert token.text.startswith(f"adrs_{token.id}")
    assert len(token.text) == 5 + 10 + 43 + 6
    assert parse_token(token.text) == token
    assert token.text not in repr(token)


def test_tokens_differ() -> None:
    assert len({new_token("u").text for _ in range(100)}) == 100


def test_checksum_is_crc32_in_base62() -> None:
    value = 0
    for digit in checksum("adru_body"):
        value = value * 62 + ALPHABET.index(digit)
    assert value == zlib.crc32(b"adru_body")


@pytest.mark.parametrize("position", [3, 5, 20, 57, 63])
def test_a_changed_character_is_noticed(position: int) -> None:
    text = new_token("u").text
    other = "1" if text[position] != "1" else "2"
    assert parse_token(text[:position] + other + text[position + 1 :]) is None


@pytest.mark.parametrize("text", ["", "adru_", "Bearer x", "adrx_" + "0" * 59, "é" * 64, "adru_" + "0" * 59 + "\n"])
def test_what_is_no_token(text: str) -> None:
    assert parse_token(text) is None


def test_a_trailing_newline_is_no_part_of_it() -> None:
    assert parse_token(new_token("u").text + "\n") is None
