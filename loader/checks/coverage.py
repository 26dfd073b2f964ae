"""Does the config agree with the tensors: the modules it targets, and those that the file adapts?

The tensors decide (ARCHITECTURE, Mechanisms). A tensor that the config does not cover would be dropped in silence by
PEFT, and a covered module without tensors would be left as it is: both are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.checks.findings import several
from adapterd.loader.checks.fit import SERVED, head_paths
from adapterd.loader.errors import Code, Problem, reject, warn
from adapterd.loader.formats.peft_config import PeftConfig
from adapterd.loader.formats.targets import Targets
from adapterd.loader.formats.tensor_names import PREFIX
from adapterd.loader.formats.text import shown

NEAR_ENTRIES = 3
"""So many dead entries get near names; the rest is the same story."""
MAX_COMPARED = 64

_CLASSIFIERS = frozenset({"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"})


def coverage_problems(config: PeftConfig, adapted: Iterable[str], base: BaseSpec) -> Iterator[Problem]:
    """`adapted`: the modules that the file has pairs for, all of them known to the base."""
    targets = Targets(config)
    candidates = list(_candidates(base, all_linear=targets.all_linear))
    covered = {m.path for m in candidates if targets.covers(m.path)}
    have = set(adapted)
    yield from _untargeted(config, sorted(have - covered))
    yield from _without_tensors(sorted(covered - have))
    if covered & have:
        yield from _dead_entries(targets, base)
    yield from _fan_in_fan_out(config, [m for m in candidates if m.path in have])
    yield from _lost_head(config)


def _candidates(base: BaseSpec, *, all_linear: bool) -> Iterator[BaseModule]:
    """What PEFT would look at; the shorthand `all-linear` leaves out embeddings and the output head."""
    heads = head_paths(base) if all_linear else frozenset()
    for module in base.modules:
        embedding = module.kind is ModuleKind.EMBEDDING and not all_linear
        if (module.kind in SERVED or embedding) and module.path not in heads:
            yield module


def _untargeted(config: PeftConfig, modules: list[str]) -> Iterator[Problem]:
    if not modules:
        return
    shown_targets = config.target_modules if isinstance(config.target_modules, str) else several(config.target_modules)
    message = f"the file adapts {several(map(shown, modules))}, which target_modules does not cover"
    hint = f"target_modules is {shown(shown_targets)}."
    if isinstance(config.target_modules, str):
        hint += " A string is a pattern for the whole module name; write a list for names."
    yield reject(Code.CONFIG_TENSOR_DISAGREE, shown(modules[0]), message, hint)


def _without_tensors(modules: list[str]) -> Iterator[Problem]:
    if not modules:
        return
    message = f"the config covers {several(modules)}, but the file has no tensors for that"
    hint = "Save the whole adapter again, or say in the config what it really adapts."
    yield reject(Code.MISSING_TENSOR, f"{PREFIX}{modules[0]}.lora_A.weight", message, hint)


def _dead_entries(targets: Targets, base: BaseSpec) -> Iterator[Problem]:
    alive = {entry for module in base.modules for entry in targets.entries_for(module.path)}
    dead = sorted(targets.entries - alive)
    if not dead:
        return
    left = several(map(shown, sorted(alive)))
    message = f"nothing in the base is called {several(map(shown, dead))}; what is left is {left}"
    hint = f"{_near(dead, base)}Names are compared with their case and at dots. Nothing was trained there."
    yield warn(Code.CONFIG_TENSOR_DISAGREE, f"target_modules.{shown(dead[0])}", message, hint)


def _near(dead: list[str], base: BaseSpec) -> str:
    """What the entries may have meant: last parts of the base's names, without case first."""
    kinds = sorted({m.path.rpartition(".")[2] for m in base.modules if m.kind in SERVED})
    folded = {kind.lower(): kind for kind in kinds}
    near: dict[str, None] = {}
    for entry in dead[:NEAR_ENTRIES]:
        last = entry.rpartition(".")[2][:MAX_COMPARED].lower()
        near |= dict.fromkeys(folded[f] for f in difflib.get_close_matches(last, folded, n=2))
    return f"Did you mean {', '.join(near)}? " if near else ""


def _fan_in_fan_out(config: PeftConfig, adapted: list[BaseModule]) -> Iterator[Problem]:
    conv = any(m.kind is ModuleKind.CONV1D for m in adapted)
    if adapted and config.fan_in_fan_out != conv:
        kind = "Conv1D" if conv else "linear"
        message = f"is {str(config.fan_in_fan_out).lower()}, the adapted modules are {kind}; the base decides"
        yield warn(Code.CONFIG_IGNORED_FIELD, "fan_in_fan_out", message)


def _lost_head(config: PeftConfig) -> Iterator[Problem]:
    if config.task_type in _CLASSIFIERS:
        message = f"is {config.task_type}, but no head is in the file; the one it was trained with is lost"
        hint = "Served on this base, the adapter meets the base's own head."
        yield warn(Code.CONFIG_TENSOR_DISAGREE, "task_type", message, hint)
