"""Whether the base that the config names is the base that the adapter is examined for.

The name is compared, never opened and never fetched. People write the same base in many ways: the
folder it lies in, its name without the owner, the quantised upload they trained on. Those are
warnings, because the shapes of all tensors are checked as well; another name is a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import Code, Problem, reject, warn
from adapterd.loader.formats.peft_config import PeftConfig
from adapterd.loader.formats.text import shown

_NAME = "base_model_name_or_path"
_HINT = "Upload it for the base it was trained on, or correct the field."
_STATE_IT = (
    "It is stated with --base ID@REV, and the admission records it. To say it in the file as well, train with "
    'from_pretrained(ID, revision="{0}"), or write "revision": "{0}" into adapter_config.json.'
)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_CACHE_PREFIX = "models--"
# Words that re-uploads hang on a base's name, between '-', '_' or '.'; the weak ones do not stand alone.
_QUANTISED = re.compile(
    r"\d{1,2}bits?|bits?|int[348]|nf4|fp[48]|w\d{1,2}a\d{1,2}|q\d|bnb|gptq|awq|hqq|eetq|aqlm|gguf|exl[23]"
    r"|mlx|quanti[sz]ed|quant",
    re.IGNORECASE,
)
_WEAK = re.compile(r"\d{1,3}g?|[kmsl]|xs|unsloth|dynamic|group", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = re.compile(r"sha256:[0-9a-f]{64}")


def base_problems(config: PeftConfig, base: BaseSpec, *, silent: bool) -> Iterator[Problem]:
    """What is to say about the config's base name and revision: nothing if both are the base's own.

    Args:
        silent: the config has no field `revision`, as old tools wrote it. That is nobody's omission;
            the null that today's PEFT writes for an unpinned base is one.
    """
    yield from _name_problems(config.base_model_name, base.id)
    if not silent:
        yield from _revision_problems(config.revision, base.revision)


def _name_problems(name: str, wanted: str) -> Iterator[Problem]:
    if name == wanted:
        return
    found, expected = f"'{shown(name, 80)}'", f"'{shown(wanted, 80)}'"
    if any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in name):
        yield reject(Code.BASE_MISMATCH, _NAME, f"{found} holds control characters", _HINT)
        return
    other = _other_spelling(name, wanted)
    if other:
        message = f"{found} is taken for {expected}: {other}"
        yield warn(Code.BASE_MISMATCH, _NAME, message, "Write the base's own name to be sure.")
    else:
        yield reject(Code.BASE_MISMATCH, _NAME, f"{found} is not the base {expected}", _HINT)


def _other_spelling(name: str, wanted: str) -> str:
    """How `name` may mean the base `wanted`; empty if it may not."""
    if "://" in name:
        return ""
    short = wanted.rpartition("/")[2]
    if name == short:
        return "the name without its owner"
    if not _is_path(name):
        return "a quantised upload of it" if _is_quantised(name.rpartition("/")[2], short) else ""
    for part in re.split(r"[\\/]+", name):
        if part == short or _is_cache_folder(part, wanted):
            return "a local path with its name as one part"
        if _is_quantised(part, short):
            return "a local path with the name of a quantised copy as one part"
    return ""


def _is_path(name: str) -> bool:
    """A name in a catalog is `name` or `owner/name`; what has more slashes or starts like a path is one."""
    starts = name.startswith(("/", "./", "../", "~")) or bool(_DRIVE.match(name))
    return starts or "\\" in name or name.count("/") > 1


def _is_quantised(name: str, short: str) -> bool:
    """`Llama-3.1-8B-bnb-4bit` for `Llama-3.1-8B`, but not `Llama-3.1-8B-Instruct`, another model."""
    suffix = name[len(short) :]
    if not name.startswith(short) or suffix[:1] not in ("-", "_", "."):
        return False
    words = re.split(r"[-_.]", suffix[1:])
    strong = [w for w in words if _QUANTISED.fullmatch(w)]
    return bool(strong) and all(w in strong or _WEAK.fullmatch(w) for w in words)


def _is_cache_folder(part: str, wanted: str) -> bool:
    """`models--owner--name`, as caches of the hub call their folders."""
    return part == _CACHE_PREFIX + wanted.replace("/", "--")


def _revision_problems(found: str | None, wanted: str) -> Iterator[Problem]:
    if found == wanted:
        return
    code, hint = Code.BASE_REVISION_MISMATCH, "The base is taken as the uploader names it."
    if found is None:
        message = f"null: the config does not say which revision it was trained on; taken is the named one, {wanted}"
        yield warn(code, "revision", message, _STATE_IT.format(wanted))
    elif any(kind.fullmatch(found) and kind.fullmatch(wanted) for kind in (_COMMIT, _FILES)):
        yield reject(code, "revision", f"trained on {found}, the base is at {wanted}", _HINT)
    else:
        message = f"'{shown(found, 80)}' does not pin a revision that can be compared with {wanted}"
        yield warn(code, "revision", message, hint)
