"""What trainers, browsers and other tools leave beside an adapter: said in words, from the names alone."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import PurePosixPath

from adapterd.loader.formats.text import shown
from adapterd.loader.identity import CONFIG_FILE, WEIGHTS_FILE

TWO_FILES = f"Upload a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained writes them."
ONLY_PACKAGE = (
    f"It can stay where it is: `adapterctl upload DIR TENANT/NAME --only-package` sends {CONFIG_FILE}, {WEIGHTS_FILE} "
    "and what belongs to them."
)
AS_SAFETENSORS = (
    "Where you trust the file, PEFT writes it anew: `model = PeftModel.from_pretrained(base_model, DIR)`, "
    "`model.save_pretrained(DIR2)`; docs/convert.md has more."
)
EXPORT = "Export it as PEFT safetensors; docs/convert.md says how."

_TRAINERS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"optimizer(_\d+)?\.(pt|bin|pth)"), "the optimizer's state"),
    (re.compile(r"scheduler\.(pt|bin|pth)"), "the scheduler's state"),
    (re.compile(r"scaler\.(pt|bin|pth)"), "the gradient scaler's state"),
    (re.compile(r"rng_state(_\d+)?\.pth"), "the state of the random numbers"),
    (re.compile(r"training_args\.bin"), "the trainer's arguments"),
    (re.compile(r"(adapter|pytorch)_model(-\d+-of-\d+)?\.bin"), "a model's weights"),
    (re.compile(r"(.*_)?model_states\.pt|(.*_)?optim_states\.pt"), "a DeepSpeed checkpoint"),
)
_PICKLED_ADAPTERS = frozenset({"adapter_model.bin", "adapter_model.pt", "pytorch_model.bin"})
_COPY = re.compile(r"(?i)copy of .+|.+ \(\d+\)\.\w+|.+ - copy( \(\d+\))?\.\w+|.+ copy( \d+)?\.\w+")


def pickle_words(path: PurePosixPath) -> str:
    """What a file that may be a pickle is, if its name says so."""
    what = next((words for pattern, words in _TRAINERS if pattern.fullmatch(path.name)), "")
    lead = f"is {what}, and may be" if what else "may be"
    return f"{lead} a pickle, which runs code when opened; it is not opened"


def pickle_hint(path: PurePosixPath, names: Container[str]) -> str:
    """The weights themselves have a way out; anything else can be left behind."""
    if path.name in _PICKLED_ADAPTERS and WEIGHTS_FILE not in names:
        return AS_SAFETENSORS
    return way_out(names)


def way_out(names: Container[str]) -> str:
    """What to do about a file that is not wanted."""
    return ONLY_PACKAGE if CONFIG_FILE in names and WEIGHTS_FILE in names else TWO_FILES


def second_weights_words(path: PurePosixPath) -> str:
    """Which second adapter a name is of: a copy, a checkpoint, or just another one."""
    folder = path.parts[0] if len(path.parts) > 1 else ""
    if re.fullmatch(r"checkpoint-\d+", folder):
        return f"an earlier state, from the trainer's {shown(folder)}, beside {WEIGHTS_FILE}: one adapter at a time"
    if is_copy(path):
        return f"by its name a copy, beside {WEIGHTS_FILE}: which of the two is the adapter?"
    return f"beside {WEIGHTS_FILE}: which of the two is the adapter?"


def is_copy(path: PurePosixPath) -> bool:
    """Whether a browser, a web drive or a file manager named it: `Copy of …`, `… (1)`, `… - Copy`."""
    return _COPY.fullmatch(path.name) is not None
