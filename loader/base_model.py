"""The base model an adapter is made for: its id, its revision and its module table.

A module table says which linears there are and how wide they are; nothing about weights. It is made
from a live torch module, from a model directory (`base_directory`), or read from a file, and all
three must agree to the byte: the table's digest is part of every version's identity (I6).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.json_strict import JsonRules, parse_object
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import BasePin, canonical_json, check_revision, sha256_hex

if TYPE_CHECKING:
    import torch
    from torch import nn

BASE_SCHEMA = "adapterd.base/1"
MAX_TABLE_BYTES = 64 << 20
"""A table file. A mixture of 61 layers × 256 experts, each listed, would be 6 MB."""
MAX_TABLE_MODULES = 250_000
MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 1 << 22
MAX_ID_LENGTH = 256
MAX_PATH_LENGTH = 512
"""As long as a tensor's name may be (`Limits.max_name_bytes`)."""
MAX_FEATURES = 1 << 31

EXPERTS_PART = "experts"
ROUTER_PARTS = frozenset({"gate", "router"})


class ModuleKind(StrEnum):
    """What a module computes, as far as an adapter cares.

    `LINEAR` and `CONV1D` are both y = x Wᵀ + b to an adapter (Conv1D keeps W transposed). `EXPERTS`
    stands for a whole stack of experts, however the library of the day stores it.
    """

    LINEAR = "linear"
    CONV1D = "conv1d"
    EMBEDDING = "embedding"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True, order=True)
class BaseModule:
    """One module of the base.

    Attributes:
        path: its full name, as `named_modules` of the live model gives it.
        kind: what it computes.
        in_features, out_features: widths; for an embedding the number of rows and their width; 0 for experts.
    """

    path: str
    kind: ModuleKind
    in_features: int
    out_features: int

    def as_json(self) -> dict[str, Any]:
        """Plain values, the inverse of what `BaseSpec.from_json` reads."""
        return {
            "path": self.path,
            "kind": self.kind.value,
            "in_features": self.in_features,
            "out_features": self.out_features,
        }


@dataclass(frozen=True)
class BaseSpec:
    """A base model. Law: `BaseSpec.from_json(spec.as_json()) == spec`.

    Attributes:
        id: the name it has in catalogs, such as `meta-llama/Llama-3.1-8B`.
        revision: 40-hex commit, or `sha256:` and 64 hex.
        modules: sorted by path, each path once.
    """

    id: str
    revision: str
    modules: tuple[BaseModule, ...]

    def __post_init__(self) -> None:
        _check_id(self.id)
        check_revision(self.revision)
        paths = [m.path for m in self.modules]
        if not paths:
            raise invalid("modules", "the table is empty")
        if any(a >= b for a, b in pairwise(paths)):
            raise invalid("modules", "the table must be sorted by path, each path once")

    @classmethod
    def of(cls, modules: Iterable[BaseModule], *, id: str, revision: str) -> BaseSpec:  # noqa: A002
        """A spec of modules in any order. Raises Failed (BASE_TABLE_INVALID, REF_INVALID)."""
        return cls(id, revision, tuple(sorted(modules)))

    @cached_property
    def table_digest(self) -> str:
        """SHA-256 (hex) of the RFC 8785 form of the modules alone, so that a renamed base keeps its table."""
        return sha256_hex(canonical_json([m.as_json() for m in self.modules]))

    @property
    def pin(self) -> BasePin:
        """What adapters of this base carry."""
        return BasePin(self.id, self.revision, self.table_digest)

    @cached_property
    def _by_path(self) -> dict[str, BaseModule]:
        return {m.path: m for m in self.modules}

    def module(self, path: str) -> BaseModule | None:
        """The module at exactly `path`, case and all, or None."""
        return self._by_path.get(path)

    def as_json(self) -> dict[str, Any]:
        """Schema `adapterd.base/1`."""
        return {
            "schema": BASE_SCHEMA,
            "id": self.id,
            "revision": self.revision,
            "modules": [m.as_json() for m in self.modules],
        }

    @classmethod
    def from_json(cls, value: object) -> BaseSpec:
        """Read `adapterd.base/1`, strictly: no unknown field, no missing one, sorted, unique.

        Raises:
            Failed: BASE_TABLE_INVALID, with the field at fault; REF_INVALID for a revision that does not pin.
        """
        body = _fields(value, "table", {"schema": str, "id": str, "revision": str, "modules": list})
        if body["schema"] != BASE_SCHEMA:
            raise invalid("schema", f"is {body['schema'][:40]!r}, wanted {BASE_SCHEMA!r}")
        if len(body["modules"]) > MAX_TABLE_MODULES:
            raise invalid("modules", f"{len(body['modules'])} modules, at most {MAX_TABLE_MODULES}")
        return cls(body["id"], body["revision"], tuple(_modules(body["modules"])))

    @classmethod
    def load(cls, path: Path) -> BaseSpec:
        """Read a table file.

        Raises:
            NotFound: PATH_NOT_FOUND if it cannot be read.
            Failed: BASE_TABLE_INVALID, REF_INVALID.
        """
        data = read_file(path, MAX_TABLE_BYTES)
        return cls.from_json(parse_json(data, path.name))

    def save(self, path: Path) -> None:
        """Write a table file that `load` reads; the same spec gives the same bytes."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_module(cls, model: nn.Module, *, id: str, revision: str) -> BaseSpec:  # noqa: A002
        """The table of a live torch module; a model on the meta device is enough. Weights are not read.

        Linears are told by their class or, as quantised ones often derive from nothing, by being a
        leaf with `in_features` and `out_features`.

        Raises:
            Failed: BASE_TABLE_INVALID, REF_INVALID.
        """
        # An embedding that two parents share is one object with two names, and an adapter may use either.
        named = list(model.named_modules(remove_duplicate=False))
        found = {path: kind for path, module in named if path and (kind := _live_module(path, module))}
        return cls.of(without_experts_inside(found), id=id, revision=revision)

    @classmethod
    def from_directory(cls, path: Path, *, id: str, revision: str) -> BaseSpec:  # noqa: A002
        """The table of a model directory: `config.json` and the headers of its safetensors files.

        Raises:
            NotFound: PATH_NOT_FOUND.
            Failed: BASE_TABLE_INVALID for what headers cannot decide (hint: use a live module).
        """
        from adapterd.loader.base_directory import modules_of_directory

        return cls.of(modules_of_directory(path), id=id, revision=revision)


def invalid(where: str, message: str, hint: str = "") -> AdapterdError:
    """The error of this room."""
    return error(Code.BASE_TABLE_INVALID, where, message, hint)


def without_experts_inside(found: Mapping[str, BaseModule]) -> Iterator[BaseModule]:
    """`found` as tables have it: stacks of experts as one entry each, without their parts and routers.

    Libraries keep moving experts between one module an expert and one stacked parameter, and the
    router beside them between a linear and a class of its own. A table that followed would change
    its digest with the version of the library, for modules that no adapter here may touch.
    """
    stacks = {path for path, module in found.items() if module.kind is ModuleKind.EXPERTS}
    for path, module in found.items():
        parent, _, last = path.rpartition(".")
        beside = f"{parent}.{EXPERTS_PART}".removeprefix(".")
        router = last in ROUTER_PARTS and beside in stacks
        if not router and not any(above in stacks for above in _parents(path)):
            yield module


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _live_module(path: str, module: nn.Module) -> BaseModule | None:
    from torch import nn

    if path.rpartition(".")[2] == EXPERTS_PART:
        return BaseModule(stack_path(path), ModuleKind.EXPERTS, 0, 0)
    if isinstance(module, nn.Embedding):
        return BaseModule(path, ModuleKind.EMBEDDING, module.num_embeddings, module.embedding_dim)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        rows, columns = cast("torch.Tensor", module.weight).shape
        return BaseModule(path, ModuleKind.CONV1D, int(rows), int(columns))
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    leaf = next(module.children(), None) is None
    if leaf and isinstance(widths[0], int) and isinstance(widths[1], int):
        return BaseModule(path, ModuleKind.LINEAR, widths[0], widths[1])
    return None


def stack_path(path: str) -> str:
    """Mixtral's stack moved from `block_sparse_moe` to `mlp` in transformers 5; files keep the old name."""
    return path.replace(".block_sparse_moe.", ".mlp.")


def _check_id(value: str) -> None:
    if not value or len(value) > MAX_ID_LENGTH or not value.isprintable() or value != value.strip():
        raise invalid("id", f"{value[:80]!r} is not 1 to {MAX_ID_LENGTH} printable characters")


def _modules(values: list[object]) -> Iterator[BaseModule]:
    kinds = {kind.value: kind for kind in ModuleKind}
    shape = {"path": str, "kind": str, "in_features": int, "out_features": int}
    for i, value in enumerate(values):
        where = f"modules[{i}]"
        f = _fields(value, where, shape)
        if not 0 < len(f["path"]) <= MAX_PATH_LENGTH or not f["path"].isprintable():
            raise invalid(f"{where}.path", "is not a module path")
        if f["kind"] not in kinds:
            raise invalid(f"{where}.kind", f"is {f['kind'][:40]!r}, known are {', '.join(kinds)}")
        lowest = 0 if f["kind"] == ModuleKind.EXPERTS else 1
        for name in ("in_features", "out_features"):
            if not lowest <= f[name] < MAX_FEATURES:
                raise invalid(f"{where}.{name}", f"{f[name]} is out of range")
        yield BaseModule(f["path"], kinds[f["kind"]], f["in_features"], f["out_features"])


def _fields(value: object, where: str, wanted: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(where, f"must be an object, not {type(value).__name__}")
    for name in sorted(map(str, value.keys() - wanted.keys())):
        raise invalid(f"{where}.{shown(name, 40)}", "unknown field")
    for name, kind in wanted.items():
        if name not in value:
            raise invalid(f"{where}.{name}", "is missing")
        if type(value[name]) is not kind:  # bool is an int to isinstance
            raise invalid(f"{where}.{name}", f"must be {kind.__name__}, not {type(value[name]).__name__}")
    return value


def read_file(path: Path, limit: int) -> bytes:
    """At most `limit` bytes. Raises NotFound (PATH_NOT_FOUND), or Failed (BASE_TABLE_INVALID) for more."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as e:
        raise error(Code.PATH_NOT_FOUND, str(path), f"cannot be read: {e.strerror or e}") from e
    if len(data) > limit:
        raise invalid(path.name, f"is larger than {limit} bytes")
    return data


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object, each name once. Raises Failed (BASE_TABLE_INVALID)."""
    code = Code.BASE_TABLE_INVALID
    rules = JsonRules(
        where, max_bytes=len(data), max_depth=MAX_JSON_DEPTH, max_values=MAX_JSON_VALUES,
        invalid=code, duplicate=code, too_deep=code, too_large=code, too_many=code, bad_number=code,
    )  # fmt: skip
    return parse_object(data, rules)
