"""Patterns of strangers: read as Python reads them, or refused; always quick."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapterd.loader.errors import Code, Refused
from adapterd.loader.formats.regex import MAX_PATTERN_CHARS, compile_part, compile_target

NAMES = [
    f"{root}.layers.{i}.{leaf}"
    for root in ("model", "model.vision_tower", "language_model.model")
    for i in (0, 7, 12)
    for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.experts.3.w1")
]


def refusal(pattern: str) -> Code:
    with pytest.raises(Refused) as caught:
        compile_target(pattern, "target_modules")
    assert caught.value.problem.where == "target_modules"
    return caught.value.code


@pytest.mark.parametrize(
    "pattern",
    [
        r"q_proj",
        r".*\.q_proj",
        r".*\.(q|v)_proj$",
        r"^model\.layers\.\d+\.self_attn\.(q_proj|v_proj)",
        r".*layers\.(?:[0-5]|1\d)\..*_proj",
        r"(?i).*Q_PROJ",
        r".*\.[^.]*_proj",
        r".*\.layers\.[]\d]{1,2}\.mlp.*",
        r"^(?!.*vision).*_proj",
        r"(?=.*mlp)(?!.*experts).*",
        r"^(?!(?:.*vision|.*[)(].*))(?:.*q_proj|.*v_proj)",
        r"(?:.*?(?:language|model).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp.*)",
    ],
)
def test_patterns_of_real_configs_match_as_in_python(pattern: str) -> None:
    ours = compile_target(pattern, "target_modules")
    assert [ours.fullmatch(n) for n in NAMES] == [re.fullmatch(pattern, n) is not None for n in NAMES]


@pytest.mark.parametrize("pattern", ["(q_proj", "q_proj)", "[a", "a**", "*a", "a{2}{3}x**", "\\", "(?!a", "a[b-a]"])
def test_what_is_no_regex(pattern: str) -> None:
    assert refusal(pattern) in (Code.CONFIG_BAD_VALUE, Code.CONFIG_UNSAFE_REGEX)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(([a-z0-9_.])+)+!$",
        r"(a*)*b",
        r"(?:(?:a|b)+\.){2,}c",
        r".*(?!vision).*",
        r".*(?<!vision)\.q_proj",
        r"(q)_\1",
        r"(?P<a>q)(?P=a)",
        r"(?P<a>q)(?P<a>q)",
        r"(?P<root>model|language_model)\..*",
        r"(?>a+)b",
        r"a++b",
        r"^(?!.*vision).*q_proj|.*v_proj",
        r"(?i)^(?!.*vision).*",
        r"[[:alpha:]]+",
        r"\pL+",
        r"\Qa.b\E",
        r"a\z",
        r"a\Z",
        r"a{,3}",
        r".*(?i)q",
        r"(?U)a+",
        r"(?#note)a",
        r"a{1001}",
        r"((a{30}){30}b)?" * 40,
        "(?!a)" * 9 + "b",
        "(?(1)a|b)",
    ],
)
def test_what_the_two_engines_read_differently_or_never_finish(pattern: str) -> None:
    assert refusal(pattern) is Code.CONFIG_UNSAFE_REGEX


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 8000 + "a" + ")" * 8000,
        "[" * 16_000,
        "(?!" * 5000,
        "(a|b|.)" * 2000,
        "(.?){1000}q",
        "\\(" * 8000,
        "(?P<" * 4000,
    ],
)
def test_hostile_patterns_are_decided_at_once(pattern: str) -> None:
    before = time.process_time()
    try:
        matcher = compile_target(pattern, "target_modules")
    except Refused:
        pass
    else:
        assert not any(matcher.fullmatch(f"{n}!") for n in NAMES * 20)
    assert time.process_time() - before < 1.0


def test_a_pattern_has_a_bounded_length() -> None:
    assert refusal("a" * (MAX_PATTERN_CHARS + 1)) is Code.CONFIG_BAD_VALUE
    assert compile_target("a" * 4000, "t").fullmatch("a" * 4000)


def test_a_part_must_be_a_pattern_of_its_own() -> None:
    with pytest.raises(Refused):
        compile_part("a)|(b", r"(.*\.)?({})$", "rank_pattern")
    assert compile_part("a|b", r"(.*\.)?({})$", "rank_pattern").match("x.b")


pieces = st.sampled_from(
    [
        "q",
        "proj",
        "_",
        ".",
        r"\.",
        ".*",
        ".+?",
        "(",
        "(?:",
        ")",
        "|",
        "*",
        "+",
        "?",
        "{2}",
        "{1,}",
        "{,2}",
        "[^.]",
        "[a-z]",
        "[",
        "]",
        r"\d",
        r"\w+",
        "^",
        "$",
        "(?!",
        "(?=",
        "(?<!",
        "(?i)",
        r"\b",
        r"\1",
        "7",
        "layers",
        "model",
        "\\",
        r"\A",
        "{",
        "}",
        "-",
    ]
)


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(pieces, max_size=8).map("".join),
    st.lists(st.sampled_from("qpmola_.70"), max_size=6).map("".join),
)
@example("[[^.]", "")
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")  # what it means today is what counts
def test_any_pattern_is_refused_or_reads_as_in_python(pattern: str, extra: str) -> None:
    try:
        ours = compile_target(pattern, "t")
    except Refused:
        return
    theirs = re.compile(pattern)
    for name in ("", "q", "proj", "model.layers.7.q_proj", extra):
        assert ours.fullmatch(name) == (theirs.fullmatch(name) is not None), (pattern, name)
