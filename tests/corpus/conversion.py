"""`adapterctl convert` on what it is for, and on everything that it must leave alone.

Of the bad cases about tensors, those whose names alone are wrong must come out as packages that `verify`
accepts; all others must be refused, and leave nothing behind. Then good adapters get their names spoilt, are
converted, and go the whole path: their outputs must be PEFT's.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from adapterd.cli.demo.shell import Shell
from adapterd.loader.errors import AdapterdError
from corpus.running import running_world
from corpus.verdicts import Case, Corpus, Outcome

STAGE = "conversion"
PREFIX = "base_model.model."
NORMALISED = "may be normalised"
"""What the corpus says of a name that is not PEFT's and means one tensor all the same."""

SPOILERS: Mapping[str, Callable[[str], str]] = {
    "llama_plain_qv": lambda name: f"_orig_mod.{name}",
    "llama_patterns": lambda name: name.replace(".weight", ".default.weight"),
    "gpt2_conv1d": lambda name: f"module.{name}",
    "bertbare_qv": lambda name: name.removeprefix(PREFIX),
    "t5_qv": lambda name: PREFIX + name,
    "phi3_fused": lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod.").replace(".weight", ".style.weight"),
}
"""Good cases, one for each way in which names go wrong, and on bases of different build."""


def bad_names(corpus: Corpus) -> Iterator[Outcome]:
    """Every refused case about tensors, converted; a false hash that somebody declares is nothing to convert."""
    with tempfile.TemporaryDirectory(prefix="adapterd-convert-") as folder:
        for case in corpus.bad(form="dir"):
            about_tensors = case.expected["stage"] == "semantic" and "declared_sha256" not in case.expected
            if about_tensors and case.expected["verdict"] == "reject":
                yield _judged(corpus, case, Path(folder))


def spoilt_names(corpus: Corpus) -> Iterator[Outcome]:
    """Good cases with spoilt names: converted, published, served, and compared with PEFT (torch is imported here)."""
    from corpus.whole_path import TENANT, accepted

    with tempfile.TemporaryDirectory(prefix="adapterd-convert-") as folder, running_world(corpus, TENANT) as world:
        for case in corpus.good():
            if case.name in SPOILERS:
                source = spoil(case.path, Path(folder, f"{case.name}.bad"), SPOILERS[case.name])
                out = convert(corpus, replace(case, path=source), Path(folder))
                yield replace(accepted(world, replace(case, path=out)), stage=STAGE)


def _judged(corpus: Corpus, case: Case, home: Path) -> Outcome:
    fixable = case.expected["code"] == "KEY_PREFIX" or NORMALISED in case.expected["note"]
    wanted = "converted and accepted" if fixable else "refused, nothing left"
    try:
        out = convert(corpus, case, home)
        told = _verified(corpus, case, out, home)
    except AdapterdError as refusal:
        left = [p.name for p in home.iterdir() if case.name in p.name]
        return Outcome(STAGE, case.name, not fixable and not left, wanted, f"{refusal.code} {left or ''}")
    return Outcome(STAGE, case.name, fixable and not told, wanted, told or "converted")


def convert(corpus: Corpus, case: Case, home: Path) -> Path:
    """Where the copy lies. Raises what the command reports."""
    out = home / f"{case.name}.out"
    Shell("", "", home).run("convert", case.path, "--out", out, *_base(corpus, case))
    return out


def _verified(corpus: Corpus, case: Case, out: Path, home: Path) -> str:
    """What `verify` says of the copy, and whether its data is not the old one's, byte for byte."""
    Shell("", "", home).run("verify", out, *_base(corpus, case))
    return "" if _data(out) == _data(case.path) else "tensor bytes differ"


def _base(corpus: Corpus, case: Case) -> list[str | Path]:
    base = corpus.base(case.base)
    return ["--base", corpus.base_directory(case.base), "--base-id", base.id, "--base-revision", base.revision]


def _data(folder: Path) -> bytes:
    data = (folder / "adapter_model.safetensors").read_bytes()
    return data[8 + struct.unpack("<Q", data[:8])[0] :]


def spoil(source: Path, target: Path, rename: Callable[[str], str]) -> Path:
    """A copy of the package `source` with other names in its header."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = target / "adapter_model.safetensors"
    data = weights.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    renamed = {name if name == "__metadata__" else rename(name): value for name, value in header.items()}
    text = json.dumps(renamed).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return target
