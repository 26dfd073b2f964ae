"""A base's module table from the class that its config names, built on the meta device: no weights, no memory.

This is for what headers cannot say (`base_directory.Undecided`): packed weights, and model types without
rules. The class is the library's own, from an installed transformers; code in the model's folder is never
run and nothing is fetched. A config is a stranger's file all the same, and a class does with it what it
likes, so this happens in a process of its own, with limits on time and memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn, cast

from adapterd.loader.base_directory import PLAIN_DTYPES, Undecided, architecture_of
from adapterd.loader.base_fields import invalid, parse_json
from adapterd.loader.base_files import StoredTensor
from adapterd.loader.base_model import MAX_TABLE_MODULES, BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import AdapterdError
from adapterd.loader.formats.text import shown

if TYPE_CHECKING:
    from torch import nn

NEEDED = ("torch", "transformers")
MAX_SECONDS = 300
"""Importing the two libraries takes most of it: 5 to 20 s from a cold disk; the largest models take 2 s."""
MAX_BYTES = 16 << 30
"""Of private memory. What is mapped from the libraries' files does not count."""
MAX_LAYERS = 2_000
"""The deepest models have some hundreds."""
MAX_ANSWER_BYTES = 128 << 20
IGNORED_FIELDS = frozenset(
    {
        "auto_map", "quantization_config", "attn_implementation", "_attn_implementation",
        "_attn_implementation_internal", "experts_implementation", "_experts_implementation",
    }
)  # fmt: skip
"""Code in the model's folder, and choices of kernels, which a config may name by an address to fetch them from."""
_OTHER_WAYS = "or make the table where the model runs: BaseSpec.from_module(model, …).save(FILE), then `base add FILE`"


def modules_of_class(
    config: Mapping[str, Any], stored: Sequence[StoredTensor], undecided: Undecided
) -> tuple[BaseModule, ...]:
    """All modules of the class that `config` names, compared with the weights' headers where these are plain.

    Args:
        undecided: why the headers do not do.

    Raises:
        Failed: BASE_TABLE_INVALID where the libraries are not installed or do not know the class, where the
            config does not make a model, and where the files are those of another one.
    """
    architecture_of(config)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        message = f"{undecided.reason}; the table must come from the model's class, and {' and '.join(missing)} "
        message += "is not installed" if len(missing) == 1 else "are not installed"
        raise invalid(undecided.where, message, f"pip install 'adapterd[transformers]', {_OTHER_WAYS}.")
    modules = _built_elsewhere(config, undecided)
    _compare(modules, stored)
    return modules


# ------------------------------------------------------------------ this side of the process


def _built_elsewhere(config: Mapping[str, Any], undecided: Undecided) -> tuple[BaseModule, ...]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ADAPTERD_")}
    environment = {
        **kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", __name__]
    data = json.dumps(config).encode()
    try:
        done = subprocess.run(  # noqa: S603 - our own module, by its name
            command, input=data, capture_output=True, env=environment, timeout=MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        _cannot(undecided, f"it took more than {MAX_SECONDS} s")
    if done.returncode or len(done.stdout) > MAX_ANSWER_BYTES:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        _cannot(undecided, shown(lines[-1]))
    answer = parse_json(done.stdout, "config.json")
    if "refused" in answer:
        _cannot(undecided, answer["refused"], answer["where"])
    return BaseSpec.from_json(answer).modules


def _cannot(undecided: Undecided, why: str, where: str = "") -> NoReturn:
    message = f"{undecided.reason}; and the model's class gives no table: {why}"
    raise invalid(where or undecided.where, message, f"Install the transformers that the model needs, {_OTHER_WAYS}.")


def _compare(modules: Sequence[BaseModule], stored: Sequence[StoredTensor]) -> None:
    """Whether the files may be this model's; how they are packed, and under which prefix, is not our business."""
    inside = {prefix for t in stored for prefix in _prefixes(t.name)}
    linears = [m.path for m in modules if m.kind in (ModuleKind.LINEAR, ModuleKind.CONV1D)]
    if linears and not any(p in inside or p.partition(".")[2] in inside for p in linears):
        message = f"the files hold none of the model's modules, such as {linears[0]}"
        raise invalid("config.json.architectures", message, "Is this config.json the one of these weights?")
    by_path = {m.path: m for m in modules}
    for tensor in stored:
        module = by_path.get(tensor.name.removesuffix(".weight"))
        plain = tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in PLAIN_DTYPES
        if module and plain and tensor.shape != (wanted := _weight_shape(module)):
            message = f"has shape {list(tensor.shape)}, by config.json it is {list(wanted)}"
            raise invalid(shown(tensor.name), message, "Is this config.json the one of these weights?")


def _weight_shape(module: BaseModule) -> tuple[int, int]:
    shape = module.in_features, module.out_features
    return shape[::-1] if module.kind is ModuleKind.LINEAR else shape


def _prefixes(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


# ------------------------------------------------------------------ the other side


def meta_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of `config`, on the meta device.

    Raises:
        Failed: BASE_TABLE_INVALID for a class that transformers does not have, and a config that does not fit it.
    """
    import torch

    kind = _model_class(config)
    wanted = cast("dict[str, Any]", _cleaned(config))
    try:
        settings = kind.config_class.from_dict(wanted)
        settings._attn_implementation = "eager"
        with torch.device("meta"):
            model: nn.Module = kind(settings)
    except AdapterdError:
        raise
    except Exception as e:
        message = f"{kind.__name__} cannot be made of it: {type(e).__name__}: {shown(str(e), 300)}"
        raise invalid("config.json", message) from e
    return model


def _model_class(config: Mapping[str, Any]) -> Any:
    import transformers

    name = architecture_of(config)
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel) or kind.config_class is None:
        message = f"transformers {transformers.__version__} has no class {shown(name, 80)}"
        if "auto_map" in config:
            message += "; the code in the model's folder is never run"
        raise invalid("config.json.architectures", message)
    if config.get("model_type") != kind.config_class.model_type:
        found = shown(str(config.get("model_type")), 40)
        message = f"is '{found}', {name} is of the type '{kind.config_class.model_type}'"
        raise invalid("config.json.model_type", message)
    return kind


def _cleaned(value: object) -> object:
    """The config without what a table does not need and a stranger must not choose."""
    if isinstance(value, dict):
        for name, number in value.items():
            if "layer" in name and isinstance(number, int) and number > MAX_LAYERS:
                raise invalid(f"config.json.{shown(name, 80)}", f"{number} layers, at most {MAX_LAYERS}")
        return {name: _cleaned(v) for name, v in value.items() if name not in IGNORED_FIELDS}
    return [_cleaned(v) for v in value] if isinstance(value, list) else value


def _limit_this_process() -> None:
    """From here on: no network, no other process, no pickle, and an end to time, memory and modules."""
    import resource

    from torch.nn.modules.module import register_module_module_registration_hook

    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > MAX_TABLE_MODULES:
            raise invalid("config.json", f"the model has more than {MAX_TABLE_MODULES} modules")

    register_module_module_registration_hook(count)
    forbidden = ("socket.", "subprocess.", "os.exec", "os.system", "os.posix_spawn", "pickle.find_class")

    def refuse(event: str, _: object) -> None:
        if event.startswith(forbidden):
            raise PermissionError(f"{event} while a model is built from its config")

    sys.addaudithook(refuse)


def _answer(config: Mapping[str, Any]) -> dict[str, object]:
    try:
        return BaseSpec.from_module(meta_model(config), id="-", revision="0" * 40).as_json()
    except AdapterdError as refusal:
        return {"refused": refusal.problem.message, "where": refusal.problem.where}


def main() -> None:
    """Read a config from stdin, write its table to stdout. Libraries print as they like, so stdout is kept away."""
    import transformers  # noqa: F401 - before the limits: importing it may ask the system for what they forbid

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    config = json.load(sys.stdin)
    _limit_this_process()
    with out:
        json.dump(_answer(config), out)


if __name__ == "__main__":
    main()
