"""Which files make an adapter package, by their names alone.

A package is flat: `adapter_config.json` and `adapter_model.safetensors`, `model.sig` beside them,
and a model card and tokenizer files if they are there. Nothing else is ever stored (I2): what is
dangerous or ambiguous is refused by name, what is merely not needed is left out and told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from adapterd.loader.errors import Code, Problem, reject, warn
from adapterd.loader.formats.leftovers import (
    EXPORT,
    ONLY_PACKAGE,
    TWO_FILES,
    is_copy,
    pickle_hint,
    pickle_words,
    second_weights_words,
    way_out,
)
from adapterd.loader.formats.names import folded, name_problem
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import CONFIG_FILE, SIGNATURE_FILE, WEIGHTS_FILE
from adapterd.loader.limits import Limits

# Stored as they are, never interpreted.
HARMLESS_FILES = frozenset({
    "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
})  # fmt: skip
STORED_FILES = frozenset({CONFIG_FILE, WEIGHTS_FILE, SIGNATURE_FILE}) | HARMLESS_FILES

_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".mar"})
_CODE = frozenset({
    ".py", ".pyc", ".pyd", ".pyw", ".so", ".dll", ".dylib", ".exe", ".com", ".sh", ".bash", ".bat", ".cmd",
    ".ps1", ".js", ".mjs", ".jar", ".wasm", ".ipynb", ".scr", ".vbs", ".lnk",
})  # fmt: skip
_ARCHIVES = frozenset({".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".whl"})
_OTHER_WEIGHTS = frozenset({".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".tflite", ".pb", ".nemo"})

# What a Mac puts beside the files of an archive.
MAC_FOLDER = "__MACOSX"

_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors|.*\.safetensors\.index\.json")
_MLX = re.compile(r"(\d+_)?adapters\.safetensors")
_DIFFUSERS = re.compile(r"pytorch_lora_weights(_\w+)?\.safetensors")


@dataclass(frozen=True, slots=True)
class Contents:
    """What the names in a package mean.

    Attributes:
        stored: names to store and to sign, sorted by their bytes; `model.sig` among them where it is there.
        left_out: names that are not read and not stored; each has its warning.
        refused: names that a package must not have; each has its refusal.
        problems: refusals first.
    """

    stored: tuple[str, ...]
    left_out: tuple[str, ...]
    refused: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return all(p.severity != "reject" for p in self.problems)


def judge_package(sizes: Mapping[str, int], limits: Limits) -> Contents:
    """Names and sizes in bytes, from a folder, an archive's list or a request; nothing is opened.

    A name with a slash lies in a sub-folder; one that ends in a slash is a folder that was not looked into.
    """
    problems = [*_bad_names(sizes), *_collisions(sizes)]
    kinds = {name: _judge(name, sizes) for name in sorted(sizes, key=_name_bytes)}
    problems += [k for k in kinds.values() if k is not None]
    problems += _missing(sizes, problems)
    stored = tuple(name for name, problem in kinds.items() if problem is None)
    left_out = tuple(name for name, problem in kinds.items() if problem is not None and problem.severity == "warn")
    refused = tuple(name for name, problem in kinds.items() if problem is not None and problem.severity == "reject")
    problems += _too_large({name: sizes[name] for name in stored}, limits)
    problems.sort(key=lambda p: p.severity != "reject")
    return Contents(stored, left_out, refused, tuple(problems))


def separable(contents: Contents, limits: Limits) -> bool:
    """Whether the folder holds one whole package beside what is refused: it can be sent without the rest."""
    alone = judge_package(dict.fromkeys(contents.stored, 0), limits)
    return bool(contents.refused) and alone.ok


def _name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _bad_names(names: Iterable[str]) -> list[Problem]:
    return [problem for name in names if (problem := name_problem(name)) is not None]


def _collisions(names: Iterable[str]) -> list[Problem]:
    """Names that one file system keeps apart and another does not."""
    seen: dict[str, str] = {}
    found: list[Problem] = []
    for name in names:
        first = seen.setdefault(folded(name), name)
        if first != name:
            message = f"the same name as {shown(first)!r} on some systems"
            found.append(reject(Code.ARCHIVE_DUPLICATE, shown(name), message))
    return found


def _judge(name: str, names: Mapping[str, int]) -> Problem | None:
    """None for a name that is stored."""
    if name in STORED_FILES:
        return None
    path = PurePosixPath(name)
    return _dangerous(name, path, names) or _weights(name, path, names) or _surplus(name, path, names)


def _dangerous(name: str, path: PurePosixPath, names: Mapping[str, int]) -> Problem | None:
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        return reject(Code.FORBIDDEN_FILE, shown(name), pickle_words(path), pickle_hint(path, names))
    if suffix in _CODE:
        return reject(Code.FORBIDDEN_FILE, shown(name), "is a program; an adapter brings none", way_out(names))
    if suffix in _ARCHIVES:
        return reject(
            Code.UNEXPECTED_FILE,
            shown(name),
            "is an archive inside the package; it is not unpacked",
            way_out(names),
        )
    return None


def _weights(name: str, path: PurePosixPath, names: Mapping[str, int]) -> Problem | None:
    """A second set of weights, or weights that this program does not read."""
    where, nested = shown(name), len(path.parts) > 1
    is_weights = path.suffix.casefold() == ".safetensors"
    if _SHARD.fullmatch(path.name):
        message = "the weights are cut into shards; one file is wanted"
        return reject(Code.SHARDED_UNSUPPORTED, where, message, "Save with a larger max_shard_size.")
    if tool := _other_tool(path, names):
        return reject(Code.UNKNOWN_FORMAT, where, f"is {tool}, not PEFT's format", EXPORT)
    if not is_weights and path.name.casefold() != CONFIG_FILE:
        return None
    if WEIGHTS_FILE in names and (is_weights or nested):
        hint = ONLY_PACKAGE if CONFIG_FILE in names else "Upload one adapter at a time; remove this file."
        return reject(Code.AMBIGUOUS_WEIGHTS, where, second_weights_words(path), hint)
    message = "lies in a sub-folder" if nested else f"is not the name that is read; {_wanted(path)} is"
    hint = f"Upload the folder {shown(path.parent)!r} itself." if nested else TWO_FILES
    if is_copy(path) and not nested:
        hint = f"By its name it is a copy. If it is the adapter, rename it to {_wanted(path)}."
    return reject(Code.UNEXPECTED_FILE, where, message, hint)


def _other_tool(path: PurePosixPath, names: Mapping[str, int]) -> str | None:
    """What the name gives away; None beside weights of PEFT's name: there it is which of the two."""
    if path.suffix.lower() in _OTHER_WEIGHTS:
        return f"a {path.suffix} file"
    if WEIGHTS_FILE in names or path.suffix.casefold() != ".safetensors":
        return None
    if _MLX.fullmatch(path.name):
        return "a name of MLX"
    if _DIFFUSERS.fullmatch(path.name):
        return "a name of diffusers"
    return "a lone tensor file, as Kohya's tools write it" if len(names) == 1 else None


def _wanted(path: PurePosixPath) -> str:
    return WEIGHTS_FILE if path.suffix.casefold() == ".safetensors" else CONFIG_FILE


def _surplus(name: str, path: PurePosixPath, names: Mapping[str, int]) -> Problem:
    where = shown(name)
    top = name.split("/", maxsplit=1)[0]
    if top.startswith(".") or top == MAC_FOLDER:
        return warn(Code.UNEXPECTED_FILE, where, "is hidden and not part of the adapter; it is left out")
    if name.endswith("/") or len(path.parts) > 1:
        return reject(Code.UNEXPECTED_FILE, where, "lies in a sub-folder; a package is flat", way_out(names))
    return warn(Code.UNEXPECTED_FILE, where, "is not needed to serve the adapter; it is left out")


def _missing(names: Mapping[str, int], found: list[Problem]) -> list[Problem]:
    """The two files that must be there, unless the refusals so far say what is there in their place."""
    told = {p.code for p in found if p.severity == "reject"}
    problems: list[Problem] = []
    if CONFIG_FILE not in names and Code.UNKNOWN_FORMAT not in told:
        problems.append(reject(Code.MISSING_CONFIG, CONFIG_FILE, "is missing", TWO_FILES))
    if WEIGHTS_FILE not in names and not told & {Code.UNKNOWN_FORMAT, Code.SHARDED_UNSUPPORTED}:
        problems.append(reject(Code.MISSING_WEIGHTS, WEIGHTS_FILE, "is missing", TWO_FILES))
    return problems


def _too_large(stored: Mapping[str, int], limits: Limits) -> list[Problem]:
    """Caps on what would be read or stored, from sizes alone (I7)."""
    caps = {
        CONFIG_FILE: (limits.max_config_bytes, Code.CONFIG_TOO_LARGE),
        SIGNATURE_FILE: (limits.max_signature_bytes, Code.QUOTA_EXCEEDED),
    }
    problems = [
        reject(code, name, f"{stored[name]} bytes, at most {cap}")
        for name, (cap, code) in caps.items()
        if stored.get(name, 0) > cap
    ]
    total = sum(stored.values())
    if total > limits.max_total_bytes:
        problems.append(reject(Code.QUOTA_EXCEEDED, "package", f"{total} bytes, at most {limits.max_total_bytes}"))
    if len(stored) > limits.max_files:
        problems.append(reject(Code.QUOTA_EXCEEDED, "package", f"{len(stored)} files, at most {limits.max_files}"))
    return problems
