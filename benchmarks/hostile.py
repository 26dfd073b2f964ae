"""What refusing costs: every bad case of the corpus, files made to be slow, and the library beside it (R3)."""

from __future__ import annotations

import json
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.adapters import base_of
from benchmarks.children import forked
from benchmarks.machine import ROOT

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import examine_path
from adapterd.loader.errors import AdapterdError
from adapterd.loader.formats.files import BytesReader
from adapterd.loader.formats.library_check import agree_with_library
from adapterd.loader.formats.safetensors_header import read_header
from adapterd.loader.limits import DEFAULT_LIMITS

TENSORS = 46_000
LIBRARY_HEADER = 59 * 10**6
SOUND = {"peft_type": "LORA", "base_model_name_or_path": "benchmarks/wide", "r": 4, "lora_alpha": 4}


def measure(folder: Path) -> dict[str, Any]:
    """Costs by group; each file is judged in a fork, so that peak memory is its own."""
    base = base_of(80)
    groups = {"corpus": _corpus_cases(), "made to be slow": _slow_cases(folder, base)}
    found = {group: [_row(name, work) for name, work in cases] for group, cases in groups.items()}
    return {"groups": found, "library": _library(folder), "header_46000": _many_tensors()}


def _row(name: str, work: Callable[[], str]) -> dict[str, Any]:
    """The cost of `work` in a fork; its memory over that of a fork that does nothing."""
    idle = forked(lambda: "idle").peak_bytes
    cost = forked(work)
    if cost.status:
        raise SystemExit(f"{name}: {cost.said}")
    return {
        "file": name, "answer": cost.said, "seconds": cost.seconds, "cpu_seconds": cost.cpu_seconds,
        "growth_bytes": max(cost.peak_bytes - idle, 0),
    }  # fmt: skip


_Case = tuple[str, Callable[[], str]]


def _corpus_cases() -> list[_Case]:
    """All bad cases of tests/corpus, made if they are not there."""
    sys.path.insert(0, str(ROOT / "tests"))
    from corpus.run_corpus import make_corpus
    from corpus.verdicts import Corpus

    root = ROOT / "build" / "corpus"
    if not (root / "bad" / "index.json").exists():
        root.mkdir(parents=True, exist_ok=True)
        make_corpus(root)
    corpus = Corpus(root)

    def judged(case: Any, base: BaseSpec) -> str:
        declared = case.expected.get("declared_sha256", {})
        return _judged(case.path, base, limits=corpus.limits, declared_sha256=declared)

    cases = [(case, corpus.base(case.base)) for case in corpus.bad()]
    return [(case.name, lambda case=case, base=base: judged(case, base)) for case, base in cases]


def _judged(path: Path, base: BaseSpec, **options: Any) -> str:
    try:
        verdict = examine_path(path, base, **options)
    except AdapterdError as refusal:
        return str(refusal.code)
    word = "" if verdict.manifest is None else "accepted "
    return word + (str(verdict.problems[0].code) if verdict.problems else "")


def _slow_cases(folder: Path, base: BaseSpec) -> list[_Case]:
    """Headers and configs as large as the limits let them be, each with one thing too often."""
    cases = []
    config = json.dumps(SOUND | {"target_modules": ["q_proj"]})
    for name, text in _headers(DEFAULT_LIMITS.max_header_bytes).items():
        data = text.count(b'"U8"') or 64
        cases.append(_written(folder / f"header-{name}", text, config, base, data=data))
    for name, field in _config_fields(DEFAULT_LIMITS.max_config_bytes // 2).items():
        config = json.dumps(SOUND | {"target_modules": ["q_proj"]} | field)
        cases.append(_written(folder / f"config-{name}", _pair_header(), config, base))
    return cases


def _written(path: Path, header: bytes, config: str, base: BaseSpec, data: int = 64) -> _Case:
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))
    (path / "adapter_config.json").write_text(config)
    return path.name, lambda: _judged(path, base)


def _pair_header() -> bytes:
    a = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}
    b = {"dtype": "F32", "shape": [2, 4], "data_offsets": [32, 64]}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    return json.dumps({name.format("A"): a, name.format("B"): b}).encode()


def _filled(start: bytes, item: bytes, end: bytes, size: int) -> bytes:
    return start + item * ((size - len(start) - len(end)) // len(item)) + end


def _headers(size: int) -> dict[str, bytes]:
    one = b'"base_model.model.model.layers.%d.lora_A.weight":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    other = b'"x' + b"y" * 150 + b'.%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    room = size // len(one % (10**5, 10**5, 10**5)) - 1
    return {
        "tensors": b"{" + b",".join(one % (i, i, i + 1) for i in range(min(room, DEFAULT_LIMITS.max_tensors))) + b"}",
        "other_tensors": b"{" + b",".join(other % (i, i, i + 1) for i in range(DEFAULT_LIMITS.max_tensors)) + b"}",
        "small_entries": b"{" + b",".join(b'"%d":{}' % i for i in range(size // 12)) + b"}",
        "metadata": b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(size // 12)) + b"}}",
        "one_key": _filled(b'{"', b"x", b'":{}}', size),
        "escapes": _filled(b'{"', b"\\u0061", b'":{}}', size),
        "quotes": _filled(b'{"', b'\\"', b'":{}}', size),
        "open_string": _filled(b'{"', b"\\\\", b"\\", size),
        "arrays": _filled(b'{"a":[', b"[],", b"1]}", size),
        "numbers": _filled(b'{"a":[', b"1,", b"1]}", size),
        "digits": _filled(b'{"a":', b"9", b"}", size),
        "fraction": _filled(b'{"a":0.', b"9", b"}", size),
        "depth": _filled(b'{"a":', b"[", b"", size),
        "spaces": _filled(b"{", b" ", b"}", size),
        "wide_characters": _filled(b'{"', "\U0001f600".encode(), b'":{}}', size),
    }


def _config_fields(size: int) -> dict[str, dict[str, Any]]:
    names = [f"m{i}" for i in range(size // 12)]
    return {
        "many_targets": {"target_modules": names[:60_000]},
        "many_excluded": {"exclude_modules": names[:60_000]},
        "rank_names": {"rank_pattern": dict.fromkeys(names[:4000], 4)},
        "rank_regexes": {"rank_pattern": {rf"(a|b){{1,20}}.*m{i}": 4 for i in range(4000)}},
        "rank_wide": {"rank_pattern": {rf".*(x{i}|[a-z]{{1,30}})": 4 for i in range(4000)}},
        "long_regex": {"target_modules": "(" + "|".join(names[:20_000]) + ")"},
        "stars": {"target_modules": "(.*)*" * 4000 + "q"},
        "repeats": {"target_modules": "((a{1,9}){1,9}){1,9}" * 200},
        "lookaheads": {"target_modules": "(?!.*x)" * 4000 + ".*q_proj"},
        "layers": {"layers_to_transform": list(range(size // 8)), "layers_pattern": ["layers"] * 8},
        "unknown_fields": {name: [] for name in names[:500]},
        "deep": {"auto_mapping": json.loads("[" * 60 + "]" * 60)},
    }


def _library(folder: Path) -> dict[str, Any]:
    """A header of 59 MB: ours, and the safetensors library alone."""
    text = _filled(b'{"a":{"dtype":"F32","shape":[', b"1,", b'1],"data_offsets":[0,4]}}', LIBRARY_HEADER)
    many = b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(10**6)) + b"}"
    rows = {}
    for name, header in (("one long shape", text), ("a million tensors", many)):
        path = folder / f"{name.replace(' ', '_')}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        rows[name] = {
            "header_bytes": len(header),
            "ours": _row(name, lambda path=path: _ours(path)),
            "library": _row(name, lambda path=path: _theirs(path)),
        }
    return rows


def _ours(path: Path) -> str:
    from adapterd.loader.formats.files import DirectoryPackage

    with DirectoryPackage.open_dir(path.parent, DEFAULT_LIMITS) as package:
        try:
            read_header(package.open(path.name), DEFAULT_LIMITS)
        except AdapterdError as refusal:
            return str(refusal.code)
    return "accepted"


def _theirs(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return "accepted"
    except SafetensorError as refusal:
        return str(refusal)[:100]


def _many_tensors() -> dict[str, Any]:
    """A header of 46,000 tensors through both parsers."""
    names = [f"base_model.model.model.layers.{i // 230}.mlp.experts.{i % 230}.up_proj" for i in range(TENSORS // 2)]
    header = {}
    for i, name in enumerate(f"{n}.lora_{side}.weight" for n in names for side in "AB"):
        header[name] = {"dtype": "BF16", "shape": [1, 2], "data_offsets": [4 * i, 4 * i + 4]}
    text = json.dumps(header).encode()
    reader = BytesReader(struct.pack("<Q", len(text)) + text + bytes(4 * TENSORS))
    ours, cpu, both = [], [], []
    for _ in range(7):
        began, busy = time.perf_counter(), time.process_time()
        parsed = read_header(reader, DEFAULT_LIMITS)
        ours.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
        agree_with_library(reader, parsed)
        both.append(time.perf_counter() - began)
    return {
        "header_bytes": len(text),
        **{k: statistics.median(v) for k, v in (("seconds", ours), ("cpu_seconds", cpu), ("both_seconds", both))},
    }


def as_lines(result: dict[str, Any]) -> list[str]:
    """Tables for people: the worst of each group."""
    lines = ["| hostile files | number | slowest | most memory |", "|---|---|---|---|"]
    for group, rows in result["groups"].items():
        slow, big = max(rows, key=lambda r: r["seconds"]), max(rows, key=lambda r: r["growth_bytes"])
        lines.append(
            f"| {group} | {len(rows)} | {_seconds(slow)} ({slow['file']}) "
            f"| {big['growth_bytes'] / 1e6:.0f} MB ({big['file']}) |"
        )
    lines += ["", "| header | bytes | ours | library alone |", "|---|---|---|---|"]
    for name, row in result["library"].items():
        cells = [
            f"{_seconds(row[side])}, {row[side]['growth_bytes'] / 1e6:.0f} MB, {row[side]['answer'][:40]}"
            for side in ("ours", "library")
        ]
        lines.append(f"| {name} | {row['header_bytes']} | {' | '.join(cells)} |")
    many = result["header_46000"]
    lines += [
        "",
        f"A header of 46,000 tensors, {many['header_bytes'] / 1e6:.1f} MB: {_seconds(many)}; with the second ",
    ]
    lines[-1] += f"parser {many['both_seconds']:.2f} s. Seconds by the clock (of the processor); memory is growth over "
    lines[-1] += "an idle process; goals 1 s and 100 MB."
    return lines


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.2f} s ({row['cpu_seconds']:.2f})"


__all__ = ["as_lines", "measure"]
