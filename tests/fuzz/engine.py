"""Runs a target many times, counts what came out, and watches time and memory."""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, given, settings

from fuzz.target import Target

MAX_INPUT_SECONDS = 2.0
"""Of processor time for one input. The largest that a fuzzer makes is a few kilobytes."""

MAX_GROWTH_BYTES = 192 << 20
"""Of the process's peak memory, after the first inputs have loaded what is loaded once."""

WARM_UP = 500
_BUFFER = 512  # bytes that Hypothesis draws a grammatical input from


@dataclass
class Report:
    """What a run found. `failure` says what was wrong with the input kept at `kept`."""

    target: str
    seed: int
    engine: str
    runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    slowest: bytes = b""
    growth_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""
    failing: bytes = b""

    def as_text(self) -> str:
        """As one JSON object; inputs as latin-1."""
        fields = dict(vars(self))
        return json.dumps(fields | {k: fields[k].decode("latin-1") for k in ("slowest", "failing")})

    @classmethod
    def from_text(cls, text: str) -> Report:
        fields = json.loads(text)
        fields |= {k: fields[k].encode("latin-1") for k in ("slowest", "failing")}
        return cls(**fields | {"outcomes": Counter(fields["outcomes"])})


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Watch:
    """Runs a target on one input after the other and keeps the report."""

    def __init__(
        self,
        target: Target,
        seed: int,
        engine: str,
        *,
        max_seconds: float = MAX_INPUT_SECONDS,
        peak: Callable[[], int] = peak_bytes,
    ) -> None:
        self.report = Report(target.name, seed, engine)
        self._target = target
        self._max_seconds = max_seconds
        self._read_peak = peak
        self._peak = 0
        for data in (b"", *corpus(target)):  # what is loaded and compiled once is no input's cost
            target.run(data)
        self._began = time.monotonic()

    def one(self, data: bytes) -> bool:
        """False once something is wrong; what it was is in the report."""
        report = self.report
        before = time.process_time()
        try:
            outcome = self._target.run(data)
        except Exception as wrong:  # noqa: BLE001 - whatever is no refusal is a finding
            report.failure, report.failing = f"{type(wrong).__name__}: {wrong}"[:2000], data
            outcome = "DEFECT"
        taken = time.process_time() - before
        report.runs += 1
        report.outcomes[outcome] += 1
        report.seconds = time.monotonic() - self._began
        if taken > report.slowest_seconds:
            report.slowest_seconds, report.slowest = taken, data
        self._guard(data)
        return not report.failure

    def _guard(self, data: bytes) -> None:
        report = self.report
        if report.slowest_seconds > self._max_seconds and not report.failure:
            report.failure = f"{report.slowest_seconds:.1f} s of processor time for one input"
            report.failing = report.slowest
        peak = self._read_peak()
        if report.runs <= WARM_UP:
            self._peak = peak
        report.growth_bytes = peak - self._peak
        if report.growth_bytes > MAX_GROWTH_BYTES and not report.failure:
            report.failure, report.failing = f"memory grew by {report.growth_bytes >> 20} MiB", data


def corpus(target: Target) -> list[bytes]:
    """The stored seeds of a target, in the order of their names."""
    return [p.read_bytes() for p in sorted(folder(target.name).glob("*"))]


def folder(name: str) -> Path:
    """Where the seeds of the target called `name` lie."""
    return Path(__file__).parent / "corpus" / name


def run_grammar(target: Target, runs: int, seed: int) -> Report:
    """Inputs of the target's Hypothesis strategy, drawn from bytes of a seeded generator."""
    watch = Watch(target, seed, "grammar")
    random = Random(seed)

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(target.grammar)
    def drawn(data: bytes) -> None:
        watch.one(data)

    while watch.report.runs < runs and not watch.report.failure:
        drawn.hypothesis.fuzz_one_input(random.randbytes(_BUFFER))
    return watch.report


def run_mutations(target: Target, runs: int, seed: int) -> Report:
    """Stored seeds, then mutations of them and of drawn inputs; needs nothing but Python."""
    watch = Watch(target, seed, "mutations")
    for data in mutations(corpus(target), target.words, Random(seed), runs):
        if not watch.one(data):
            break
    return watch.report


def mutations(seeds: Sequence[bytes], words: Sequence[bytes], random: Random, count: int) -> Iterator[bytes]:
    """`count` inputs: the seeds, then seeds with one to eight cuts, flips, repeats and words of the format."""
    yield from seeds[:count]
    for _ in range(count - len(seeds)):
        data = bytearray(random.choice(seeds))
        for _ in range(random.choice((1, 1, 2, 3, 8))):
            _mutate(data, random, words)
        yield bytes(data)


def _mutate(data: bytearray, random: Random, words: Sequence[bytes]) -> None:
    at, length = random.randrange(len(data) + 1), random.choice((1, 1, 2, 4, 16, 64))
    match random.randrange(6):
        case 0 if at < len(data):
            data[at] ^= 1 << random.randrange(8)
        case 1:
            del data[at : at + length]
        case 2:
            data[at:at] = data[at : at + length]
        case 3:
            data[at : at + random.choice((0, length))] = random.choice(words or (b'"',))
        case 4:
            other = random.randrange(len(data) + 1)
            data[at : at + length] = data[other : other + length]
        case _:
            data[at : at + 1] = bytes([random.choice(b'0123456789,:"[]{}\\-.eE \0')])
