"""Which files make an adapter package, by their names alone.

A package is flat: `adapter_config.json` and `adapter_model.safetensors`, `model.sig` beside them,
and a model card and tokenizer files if they are there. Nothing else is ever stored (I2): what is
dangerous or ambiguous is refused by name, what is merely not needed is left out and told.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from adapterd.loader.errors import Code, Problem, reject, warn
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import CONFIG_FILE, SIGNATURE_FILE, WEIGHTS_FILE
from adapterd.loader.limits import Limits

MAX_NAME_BYTES = 255

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

_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors|.*\.safetensors\.index\.json")
_MLX = re.compile(r"(\d+_)?adapters\.safetensors")
_DIFFUSERS = re.compile(r"pytorch_lora_weights(_\w+)?\.safetensors")

TWO_FILES = f"Upload a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained writes them."


@dataclass(frozen=True, slots=True)
class Contents:
    """What the names in a package mean.

    Attributes:
        stored: names to store and to sign, sorted by their bytes; `model.sig` among them where it is there.
        left_out: names that are not read and not stored; each has its warning.
        problems: refusals first.
    """

    stored: tuple[str, ...]
    left_out: tuple[str, ...]
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
    problems += _too_large({name: sizes[name] for name in stored}, limits)
    problems.sort(key=lambda p: p.severity != "reject")
    return Contents(stored, left_out, tuple(problems))


def _name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _bad_names(names: Iterable[str]) -> list[Problem]:
    return [
        reject(
            Code.ARCHIVE_PATH if _leaves(name) else Code.ARCHIVE_BAD_NAME,
            shown(name),
            "not a file's name",
            TWO_FILES,
        )
        for name in names
        if _leaves(name) or not name.isprintable() or len(_name_bytes(name)) > MAX_NAME_BYTES
    ]


def _leaves(name: str) -> bool:
    """Whether some system would look for the name outside of the package."""
    return "\\" in name or ":" in name or name.startswith("/") or ".." in name.split("/")


def _collisions(names: Iterable[str]) -> list[Problem]:
    """Names that one file system keeps apart and another does not."""
    seen: dict[str, str] = {}
    found: list[Problem] = []
    for name in names:
        folded = unicodedata.normalize("NFC", name).casefold()
        if folded in seen:
            found.append(
                reject(
                    Code.ARCHIVE_DUPLICATE,
                    shown(name),
                    f"the same name as {shown(seen[folded])!r} on some systems",
                )
            )
        seen.setdefault(folded, name)
    return found


def _judge(name: str, names: Mapping[str, int]) -> Problem | None:
    """None for a name that is stored."""
    if name in STORED_FILES:
        return None
    path = PurePosixPath(name)
    return _dangerous(name, path) or _weights(name, path, names) or _surplus(name, path)


def _dangerous(name: str, path: PurePosixPath) -> Problem | None:
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        return reject(
            Code.FORBIDDEN_FILE, shown(name), "may be a pickle, which runs code when opened; it is not",
            TWO_FILES,
        )  # fmt: skip
    if suffix in _CODE:
        return reject(Code.FORBIDDEN_FILE, shown(name), "is a program; an adapter brings none", TWO_FILES)
    if suffix in _ARCHIVES:
        return reject(
            Code.UNEXPECTED_FILE,
            shown(name),
            "is an archive inside the package; it is not unpacked",
            TWO_FILES,
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
        return reject(Code.UNKNOWN_FORMAT, where, f"is {tool}, not PEFT's format", TWO_FILES)
    if not is_weights and path.name.casefold() != CONFIG_FILE:
        return None
    if WEIGHTS_FILE in names and (is_weights or nested):
        message = f"beside {WEIGHTS_FILE}: which of the two is the adapter?"
        return reject(Code.AMBIGUOUS_WEIGHTS, where, message, "Upload one adapter at a time; remove this file.")
    message = "lies in a sub-folder" if nested else f"is not the name that is read; {_wanted(path)} is"
    hint = f"Upload the folder {shown(path.parent)!r} itself." if nested else TWO_FILES
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


def _surplus(name: str, path: PurePosixPath) -> Problem:
    where = shown(name)
    if path.parts[0].startswith("."):
        return warn(Code.UNEXPECTED_FILE, where, "is hidden and not part of the adapter; it is left out")
    if name.endswith("/") or len(path.parts) > 1:
        return reject(Code.UNEXPECTED_FILE, where, "lies in a sub-folder; a package is flat", TWO_FILES)
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
