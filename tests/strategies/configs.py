"""`adapter_config.json` files that know the grammar: sound ones, ones with a slip or two, hostile ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st

from adapterd.loader.formats.config_fields import IGNORABLE, REFUSED_UNLESS, SUPPORTED
from fakes.packages import peft_config, tiny_llama_spec
from strategies.spelling import LEADERS, NO_INTEGERS, NO_STRINGS, TRAILERS, Literal, Table, spelled

FIELDS = tuple(sorted(SUPPORTED | IGNORABLE.keys() | REFUSED_UNLESS.keys()))
REGEXES = (
    "q_proj", ".*", r".*\.(q_proj|v_proj)", r"^model\.layers\.[0-3]\..*q_proj$", r"(?!.*mlp).*\.q_proj",
    r"(?:q|v)_proj", r".*(?<!x)q_proj", r"(a+)+$", r"(.*){40}q", r"a{1000}{1000}", "[", "(", r"\1",
    r"(?P<a>q)(?P=a)", r"\p{L}+", "(?i)Q_PROJ", r"\d+", r"\bq\b", "q*+", "q_proj\n", "\0", "\\", "(?#)",
    "(?x) q", "[[:alpha:]]", "é", "\ud83d", "a|" * 300, "(" * 300,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 8, 513, 2**31, 0.0, 8.0, -0.5, 1e308, 3.5e38, "", "none", "all", "LORA", "lora",
    "true", "all-linear", "ALL-LINEAR", "gaussian", "pissa", "eva", "CAUSAL_LM", [], {}, [1], ["q_proj"],
    [["q_proj"]], [None], {"q_proj": 4}, {"q_proj": "4"}, {"(": 4}, {"": 4}, {"q_proj": -1}, {"a": {"b": {}}},
    ["x" * 600], "x" * 2000,
)  # fmt: skip


def _sound(random: Random) -> dict[str, Any]:
    targets = random.choice((["q_proj"], ["q_proj", "v_proj"], r".*\.(q_proj|v_proj)", "all-linear"))
    config = peft_config(tiny_llama_spec(), random.choice((1, 4, 64)), random.choice((1, 8, 16.0, 0.5)), [])
    config["target_modules"] = targets
    if random.random() < 0.3:
        config["rank_pattern"] = {random.choice(("q_proj", r"layers\.0\..*v_proj", "^model")): 2}
    if random.random() < 0.3:
        config["alpha_pattern"] = {"v_proj": random.choice((4, 4.5))}
    if random.random() < 0.2 and isinstance(targets, list):
        config |= {
            "layers_to_transform": random.choice(([0], 1, [0, 1])),
            "layers_pattern": random.choice(("layers", None)),
        }
    if random.random() < 0.2:
        config["use_rslora"] = True
    for name in random.sample(FIELDS, 3):
        if name not in SUPPORTED and name not in config:
            config[name] = None
    return config


def _value_slip(config: dict[str, Any], random: Random) -> None:
    config[random.choice(FIELDS)] = random.choice((*VALUES, *NO_INTEGERS, *NO_STRINGS))


def _missing_slip(config: dict[str, Any], random: Random) -> None:
    config.pop(random.choice(list(config)), None)


def _unknown_slip(config: dict[str, Any], random: Random) -> None:
    name = random.choice(("lora_new", "R", "", "é", "__class__", "peft_type ", "x" * 300, "a\n", "\u202e"))
    config[name] = random.choice(VALUES)


def _regex_slip(config: dict[str, Any], random: Random) -> None:
    pattern = random.choice(REGEXES)
    match random.randrange(4):
        case 0:
            config["target_modules"] = pattern
        case 1:
            config["exclude_modules"] = pattern
        case 2:
            config[random.choice(("rank_pattern", "alpha_pattern"))] = {pattern: 2, random.choice(REGEXES): 3}
        case 3:
            config |= {"layers_to_transform": [0], "layers_pattern": [pattern]}


SLIPS: tuple[Callable[[dict[str, Any], Random], None], ...] = (
    _value_slip, _value_slip, _missing_slip, _unknown_slip, _regex_slip,
)  # fmt: skip


def _randoms() -> st.SearchStrategy[Random]:
    return st.integers(0, 2**32 - 1).map(Random)


@st.composite
def sound_configs(draw: st.DrawFn) -> bytes:
    """Accepted, with or without a warning."""
    random = draw(_randoms())
    return spelled(_sound(random), random, plain=draw(st.booleans()))


@st.composite
def near_configs(draw: st.DrawFn) -> bytes:
    """A sound config with one to three slips, in a field or in the text."""
    random = draw(_randoms())
    config = _sound(random)
    for slip in draw(st.lists(st.sampled_from(SLIPS), min_size=1, max_size=3)):
        slip(config, random)
    pairs = list(config.items())
    if random.random() < 0.1 and pairs:
        pairs.append(random.choice(pairs))
    text = spelled(Table.of(pairs), random)
    return random.choice(LEADERS) + text + random.choice(TRAILERS) if random.random() < 0.1 else text


HOSTILE: tuple[Callable[[int], Any], ...] = (
    lambda n: Literal(b"[" * n + b"]" * n),
    lambda n: Literal(b'{"a":' * n + b"1" + b"}" * n),
    lambda n: [f"m{i}" for i in range(n)],
    lambda n: {f"m{i}": 4 for i in range(n)},
    lambda n: {f"(a|b){{{i}}}x": 4 for i in range(n)},
    lambda n: "(" * n + ")" * n,
    lambda n: f"(a?){{{n}}}a{{{n}}}",
    lambda n: "(?!" * n + ")" * n,
    lambda n: "x" * n,
    lambda n: Literal(b"9" * (n + 1)),
    lambda n: Literal(b"1." + b"9" * (n + 1)),
    lambda n: [None] * n,
)


@st.composite
def hostile_configs(draw: st.DrawFn) -> bytes:
    """A sound config with one field that is too much."""
    random = draw(_randoms())
    config = _sound(random)
    config[draw(st.sampled_from((*FIELDS, "unknown")))] = draw(st.sampled_from(HOSTILE))(
        draw(st.sampled_from((0, 1, 9, 65, 500, 3000)))
    )
    return spelled(config, random, plain=True)


def config_files() -> st.SearchStrategy[bytes]:
    """Any of them; mostly nearly valid."""
    return st.one_of(sound_configs(), near_configs(), near_configs(), near_configs(), hostile_configs())
