"""The base model an adapter is made for: its id, its revision and its module table.

A module table says which linears there are and how wide they are; nothing about weights. It is made
from a live torch module, from a model directory (`base_directory`), or read from a file, and all
three must agree to the byte: the table's digest is part of every version's identity (I6).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterd.loader.base_alternatives import PRIMARY, Alternative, check_alternatives
from adapterd.loader.base_fields import fields, invalid, is_module_path, parse_json, read_file
from adapterd.loader.identity import BasePin, canonical_json, check_revision, sha256_hex

if TYPE_CHECKING:
    from torch import nn

BASE_SCHEMA = "adapterd.base/1"
MAX_TABLE_BYTES = 64 << 20
"""A table file. A mixture of 61 layers × 256 experts, each listed, would be 6 MB."""
MAX_TABLE_MODULES = 250_000
MAX_ID_LENGTH = 256
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
        alternatives: other names of the modules, sorted by name; an adapter may be written in one of them.
        weights_digest: of the weights (`base_weights`), where somebody asked for it; says nothing about the
            table and is no part of the pin.
    """

    id: str
    revision: str
    modules: tuple[BaseModule, ...]
    alternatives: tuple[Alternative, ...] = ()
    weights_digest: str | None = None

    def __post_init__(self) -> None:
        _check_id(self.id)
        check_revision(self.revision)
        paths = [m.path for m in self.modules]
        if not paths:
            raise invalid("modules", "the table is empty")
        if any(a >= b for a, b in pairwise(paths)):
            raise invalid("modules", "the table must be sorted by path, each path once")
        check_alternatives(self.alternatives, paths)
        if self.weights_digest is not None and not re.fullmatch(r"[0-9a-f]{64}", self.weights_digest):
            raise invalid("weights_digest", f"{self.weights_digest[:80]!r} is not a SHA-256 in lower hex")

    @classmethod
    def of(cls, modules: Iterable[BaseModule], *, id: str, revision: str) -> BaseSpec:  # noqa: A002
        """A spec of modules in any order. Raises Failed (BASE_TABLE_INVALID, REF_INVALID)."""
        return cls(id, revision, tuple(sorted(modules)))

    def with_alternatives(self, alternatives: Iterable[Alternative]) -> BaseSpec:
        """The same base with more namings, and therefore another pin. Raises Failed (BASE_TABLE_INVALID)."""
        more = (*self.alternatives, *alternatives)
        return replace(self, alternatives=tuple(sorted(more, key=lambda a: a.name)))

    def named(self, naming: str) -> BaseSpec:
        """The base as the naming writes it: its modules under the names that adapters use there.

        Raises:
            KeyError: no such naming.
        """
        if naming == PRIMARY:
            return self
        renames = {a.name: a.renames for a in self.alternatives}[naming]
        name_of = {path: name for name, path in renames}
        modules = (replace(m, path=name_of.get(m.path, m.path)) for m in self.modules)
        return BaseSpec.of(modules, id=self.id, revision=self.revision)

    @cached_property
    def table_digest(self) -> str:
        """SHA-256 (hex) of the RFC 8785 form of the modules alone, so that a renamed base keeps its table.

        With alternatives, of an object of both: they decide what an adapter's names mean.
        """
        modules = [m.as_json() for m in self.modules]
        if not self.alternatives:
            return sha256_hex(canonical_json(modules))
        alternatives = [a.as_json() for a in self.alternatives]
        return sha256_hex(canonical_json({"alternatives": alternatives, "modules": modules}))

    @cached_property
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
        """Schema `adapterd.base/1`; `alternatives` and `weights_digest` only where there are any."""
        body: dict[str, Any] = {
            "schema": BASE_SCHEMA,
            "id": self.id,
            "revision": self.revision,
            "modules": [m.as_json() for m in self.modules],
        }
        if self.alternatives:
            body["alternatives"] = [a.as_json() for a in self.alternatives]
        if self.weights_digest is not None:
            body["weights_digest"] = self.weights_digest
        return body

    @classmethod
    def from_json(cls, value: object) -> BaseSpec:
        """Read `adapterd.base/1`, strictly: no unknown field, no missing one, sorted, unique.

        Raises:
            Failed: BASE_TABLE_INVALID, with the field at fault; REF_INVALID for a revision that does not pin.
        """
        wanted = {"schema": str, "id": str, "revision": str, "modules": list}
        body = fields(value, "table", wanted, {"alternatives": list, "weights_digest": str})
        if body["schema"] != BASE_SCHEMA:
            raise invalid("schema", f"is {body['schema'][:40]!r}, wanted {BASE_SCHEMA!r}")
        if len(body["modules"]) > MAX_TABLE_MODULES:
            raise invalid("modules", f"{len(body['modules'])} modules, at most {MAX_TABLE_MODULES}")
        listed = enumerate(body.get("alternatives", []))
        alternatives = tuple(Alternative.from_json(a, f"alternatives[{i}]") for i, a in listed)
        modules = tuple(_modules(body["modules"]))
        return cls(body["id"], body["revision"], modules, alternatives, body.get("weights_digest"))

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

        A base that is registered with alternatives or with a weights digest carries these as well: take its
        table from the registry (`adapterctl base export`), and the engine compares it with the live model.

        Raises:
            Failed: BASE_TABLE_INVALID, REF_INVALID.
        """
        from adapterd.loader.base_live import modules_of_live

        return cls.of(modules_of_live(model), id=id, revision=revision)

    @classmethod
    def from_directory(cls, path: Path, *, id: str, revision: str) -> BaseSpec:  # noqa: A002
        """The table of a model directory: `config.json` and the headers of its safetensors files.

        What headers cannot decide (packed weights, model types without rules) is decided by the class that the
        config names, built on the meta device; that needs torch and transformers.

        Raises:
            NotFound: PATH_NOT_FOUND.
            Failed: BASE_TABLE_INVALID for malformed files, and where neither way gives a table.
        """
        from adapterd.loader.base_directory import modules_of_directory

        return cls.of(modules_of_directory(path), id=id, revision=revision)


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
        f = fields(value, where, shape)
        if not is_module_path(f["path"]):
            raise invalid(f"{where}.path", "is not a module path")
        if f["kind"] not in kinds:
            raise invalid(f"{where}.kind", f"is {f['kind'][:40]!r}, known are {', '.join(kinds)}")
        lowest = 0 if f["kind"] == ModuleKind.EXPERTS else 1
        for name in ("in_features", "out_features"):
            if not lowest <= f[name] < MAX_FEATURES:
                raise invalid(f"{where}.{name}", f"{f[name]} is out of range")
        yield BaseModule(f["path"], kinds[f["kind"]], f["in_features"], f["out_features"])
