"""Do the pairs fit the base: known modules of a served kind, equal widths, the configured rank?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from types import MappingProxyType

from adapterd.loader.base_model import EXPERTS_PART, ROUTER_PARTS, BaseModule, BaseSpec, ModuleKind, stack_path
from adapterd.loader.checks.findings import several
from adapterd.loader.checks.pairs import Pair
from adapterd.loader.errors import Code, Problem, reject, warn
from adapterd.loader.formats.text import shown
from adapterd.loader.gram import DTYPES
from adapterd.loader.identity import WEIGHTS_FILE
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import TensorEntry
from adapterd.loader.scaling import Effective

NEAR_SEARCHES = 3
"""So many unknown modules get a hint; comparing names costs, and the first ones tell the story."""
NEAR_CANDIDATES = 64
NEAR_SHOWN = 3

_OTHER_BASE = "Upload it for the base it was trained on: another size of the model has other widths."
_DENSE = "Train it on attention, shared experts and dense layers alone: leave experts and routers out of its targets."
_ONE_STATE = "A and B are of two trainings, or the file was put together by hand: save the adapter again."

PACKED_DTYPES = frozenset({"I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4"})
"""Of safetensors, that adapters in INT8 or FP8 would have: codes, of which scales make values."""
_UNPACK = (
    "Adapters in INT8 and FP8 are not served: a cast would lose their scales. Multiply these in, and save the factors "
    "as BF16 or F16."
)

SERVED = (ModuleKind.LINEAR, ModuleKind.CONV1D)


def module_problems(
    pairs: Iterable[Pair], base: BaseSpec, limits: Limits, own: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Problem]:
    """Modules that the base has not, that are not served, or that a policy forbids.

    One problem for all layers in which the same is wrong, about the first of them.

    Args:
        own: name in `base` → the base's own path, where `base` is written in another naming: a policy
            speaks of the base's own modules, and another name makes no head a common linear.
    """
    heads = head_paths(base, own)
    groups: dict[tuple[Code, str], list[tuple[Pair, Problem]]] = {}
    for pair in pairs:
        if problem := _module_problem(pair, base, heads, limits, own):
            groups.setdefault((problem.code, _without_numbers(pair.module)), []).append((pair, problem))
    for i, group in enumerate(groups.values()):
        pair, first = group[0]
        if first.code is Code.UNKNOWN_MODULE and i < NEAR_SEARCHES:
            first = replace(first, hint=_near_hint(pair, base))
        more = f" ({len(group)} such modules)" if len(group) > 1 else ""
        yield replace(first, message=first.message + more)


def _module_problem(
    pair: Pair, base: BaseSpec, heads: Set[str], limits: Limits, own: Mapping[str, str]
) -> Problem | None:
    module = base.module(pair.module)
    where = shown(pair.module)
    if of_experts := _of_experts(pair.module, base):
        return reject(Code.UNSUPPORTED_FEATURE, where, of_experts, _DENSE)
    if module is None:
        return reject(Code.UNKNOWN_MODULE, where, f"the base {shown(base.id)} has no such module")
    if module.kind not in SERVED:
        message = f"adapters of a module of kind {module.kind} are not served"
        return reject(Code.UNSUPPORTED_FEATURE, where, message)
    if pair.module in heads:
        return reject(Code.UNSUPPORTED_FEATURE, where, "adapters of the output head are not served")
    if not _allowed(own.get(pair.module, pair.module), limits):
        allowed = several(limits.allowed_target_modules or (), 12)
        return reject(Code.TARGET_NOT_ALLOWED, where, f"may not be adapted here; allowed are {allowed}")
    return None


def _without_numbers(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def head_paths(base: BaseSpec, own: Mapping[str, str] = MappingProxyType({})) -> frozenset[str]:
    """Linears from hidden size to vocabulary: the transpose of an embedding, outside all numbered layers."""
    tables = {(m.out_features, m.in_features) for m in base.modules if m.kind is ModuleKind.EMBEDDING}
    return frozenset(
        m.path
        for m in base.modules
        if m.kind is ModuleKind.LINEAR
        and (m.in_features, m.out_features) in tables
        and not _numbered(own.get(m.path, m.path))
    )


def _numbered(path: str) -> bool:
    return any(part.isdecimal() for part in path.split("."))


def _allowed(path: str, limits: Limits) -> bool:
    allowed = limits.allowed_target_modules
    return allowed is None or path.rpartition(".")[2] in allowed


def _stack_of(path: str, base: BaseSpec) -> str:
    """The base's stack of experts that `path` is, or is inside of, in either of its spellings; else empty."""
    parts = path.split(".")
    if EXPERTS_PART not in parts:
        return ""
    stack = stack_path(".".join(parts[: parts.index(EXPERTS_PART) + 1]))
    found = base.module(stack)
    return stack if found is not None and found.kind is ModuleKind.EXPERTS else ""


def _of_experts(path: str, base: BaseSpec) -> str:
    """Why nothing is served there: it is inside of a stack of experts, or their router; else empty."""
    if stack := _stack_of(path, base):
        return f"is inside the experts {stack}; adapters of experts are not served"
    parent, _, last = path.rpartition(".")
    router = last in ROUTER_PARTS and base.module(path) is None
    if router and (stack := _stack_of(f"{parent}.{EXPERTS_PART}", base)):
        return f"is the router of the experts {stack}; adapters of routers are not served"
    return ""


def _near_hint(pair: Pair, base: BaseSpec) -> str:
    near = near_modules(pair, base)
    return f"Near ones: {', '.join(near)}." if near else "Was it trained on another architecture?"


def near_modules(pair: Pair, base: BaseSpec) -> list[str]:
    """Up to three modules that may be meant: siblings (that fit, if any do), or paths that end alike."""
    served = [m for m in base.modules if m.kind in SERVED]
    parent = pair.module.rpartition(".")[0]
    siblings = [m for m in served if m.path.rpartition(".")[0] == parent][:NEAR_CANDIDATES]
    fitting = [m for m in siblings if _fits(pair, m)]
    candidates = [m.path for m in fitting or siblings] or _same_ending(pair.module, served)
    wanted = pair.module.lower()
    close = {path: difflib.SequenceMatcher(None, wanted, path.lower()).ratio() for path in candidates}
    return sorted(close, key=lambda path: (-close[path], path))[:NEAR_SHOWN]


def near_names(path: str, base: BaseSpec) -> list[str]:
    """Up to three served modules whose paths end like `path`, where no shapes are at hand."""
    close = _same_ending(path, [m for m in base.modules if m.kind in SERVED])
    return sorted(close)[:NEAR_SHOWN]


def _fits(pair: Pair, module: BaseModule) -> bool:
    return pair.a.shape[1:] == (module.in_features,) and pair.b.shape[:1] == (module.out_features,)


def _same_ending(path: str, modules: Iterable[BaseModule]) -> list[str]:
    """The paths that share the most parts at the end with `path`, case aside; at least one, at most 64."""
    wanted = path.lower().split(".")[::-1]
    shared: dict[int, list[str]] = {}
    for module in modules:
        parts = module.path.lower().split(".")[::-1]
        length = next((i for i, (a, b) in enumerate(zip(wanted, parts, strict=False)) if a != b), len(parts))
        shared.setdefault(length, []).append(module.path)
    best = max(shared, default=0)
    return shared[best][:NEAR_CANDIDATES] if best else []


def shape_problems(
    pairs: Iterable[Pair], base: BaseSpec, scalings: Mapping[str, Effective], limits: Limits
) -> Iterator[Problem]:
    """Shapes, ranks and dtypes of pairs whose modules are known."""
    pairs = tuple(pairs)
    fitting = []
    for pair in pairs:
        module = base.module(pair.module)
        if module is None:  # told by module_problems
            continue
        problems = list(_width_problems(pair, module)) or list(_rank_problems(pair, scalings, limits))
        yield from problems
        fitting += [] if problems else [pair]
    yield from _dtype_problems(pairs)
    yield from _wide_rank(fitting)


def _width_problems(pair: Pair, module: BaseModule) -> Iterator[Problem]:
    for tensor, wanted, axis in ((pair.a, module.in_features, 1), (pair.b, module.out_features, 0)):
        wanted_shape = f"[r, {wanted}]" if axis else f"[{wanted}, r]"
        if len(tensor.shape) != 2 or tensor.shape[axis] != wanted:
            message = f"has shape {list(tensor.shape)}, {module.path} wants {wanted_shape}"
            turned = len(tensor.shape) == 2 and tensor.shape[1 - axis] == wanted
            hint = "It fits when transposed: was it converted from another tool's format?" if turned else _OTHER_BASE
            yield reject(Code.SHAPE_MISMATCH, shown(tensor.name), message, hint)


def _rank_problems(pair: Pair, scalings: Mapping[str, Effective], limits: Limits) -> Iterator[Problem]:
    rank, other, wanted = pair.a.shape[0], pair.b.shape[1], scalings[pair.module].rank
    where = shown(pair.a.name)
    if rank != other:
        yield reject(Code.RANK_MISMATCH, where, f"has rank {rank}, its lora_B has {other}", _ONE_STATE)
    elif rank != wanted:
        hint = f"Are config and tensors of one training? If rank {rank} was trained, say so in r or rank_pattern."
        yield reject(Code.RANK_MISMATCH, where, f"has rank {rank}, the config says {wanted}", hint)
    elif rank > limits.max_rank:
        yield reject(Code.RANK_TOO_LARGE, where, f"has rank {rank}, at most {limits.max_rank} are served")


def _dtype_problems(pairs: Iterable[Pair]) -> Iterator[Problem]:
    first: dict[str, TensorEntry] = {}
    for pair in pairs:
        first.setdefault(pair.a.dtype, pair.a)
        first.setdefault(pair.b.dtype, pair.b)
    for dtype, tensor in first.items():
        if dtype not in DTYPES:
            message = f"is {dtype}; adapters are stored as {', '.join(DTYPES)}"
            hint = _UNPACK if dtype in PACKED_DTYPES else "Cast it and save it again."
            yield reject(Code.DTYPE_UNSUPPORTED, shown(tensor.name), message, hint)
    if len(first) > 1:
        message = f"the file mixes {', '.join(sorted(first))}; each tensor is taken as it is stored"
        yield warn(Code.DTYPE_MIXED, WEIGHTS_FILE, message)


def _wide_rank(pairs: Iterable[Pair]) -> Iterator[Problem]:
    wide = [p for p in pairs if p.a.shape[0] > min(p.a.shape[1], p.b.shape[0])]
    if wide:
        rank, widest = wide[0].a.shape[0], min(wide[0].a.shape[1], wide[0].b.shape[0])
        message = f"rank {rank} is above the module's smaller width {widest}; {len(wide)} modules are like that"
        yield warn(Code.RANK_TOO_LARGE, shown(wide[0].module), message, "A smaller rank says the same in less.")
