"""The manifest: the parsed, checked, frozen description of one version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapterd.loader.base_alternatives import PRIMARY
from adapterd.loader.identity import BasePin, FileEntry, canonical_json, sha256_hex, version_digest

MANIFEST_TYPE = "adapterd.manifest/1"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of `adapter_model.safetensors`.

    Attributes:
        name: as in the file.
        dtype: safetensors' word: F32, F16 or BF16.
        shape: as in the file.
        begin, end: byte offsets from the start of the *file* (not of its data section).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "begin": self.begin,
            "end": self.end,
        }

    @classmethod
    def from_json(cls, f: Mapping[str, Any]) -> TensorEntry:
        return cls(f["name"], f["dtype"], tuple(f["shape"]), f["begin"], f["end"])


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One adapted module: y += scaling · (x Aᵀ) Bᵀ with A [rank, in_features] and B [out_features, rank].

    Attributes:
        name: full module path in the base's table.
        rank, alpha: as configured for this module.
        scaling: what the engine multiplies by, exactly once (I5).
        dtype: of both tensors.
        delta_norm: ‖scaling · B A‖_F, or None where content was not read. Not part of the manifest digest.
    """

    name: str
    rank: int
    alpha: float
    scaling: float
    dtype: str
    in_features: int
    out_features: int
    a: TensorEntry
    b: TensorEntry
    delta_norm: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rank": self.rank,
            "alpha": self.alpha,
            "scaling": self.scaling,
            "dtype": self.dtype,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "delta_norm": self.delta_norm,
            "a": self.a.as_json(),
            "b": self.b.as_json(),
        }

    @classmethod
    def from_json(cls, f: Mapping[str, Any]) -> ModuleEntry:
        return cls(
            f["name"], f["rank"], f["alpha"], f["scaling"], f["dtype"], f["in_features"], f["out_features"],
            TensorEntry.from_json(f["a"]), TensorEntry.from_json(f["b"]), f["delta_norm"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version.

    Attributes:
        base: the base it is for.
        modules: sorted by name.
        files: sorted by the bytes of path, without `model.sig`.
        naming: in which of the base's tables the adapter's tensors and config are written. The modules' names
            here are the base's own in any case.
    """

    base: BasePin
    modules: tuple[ModuleEntry, ...]
    files: tuple[FileEntry, ...]
    naming: str = PRIMARY

    @property
    def version_digest(self) -> str:
        return version_digest(self.files)

    @property
    def total_bytes(self) -> int:
        """All stored files but the signature."""
        return sum(f.size for f in self.files)

    @property
    def tensor_bytes(self) -> int:
        """All A and B."""
        return sum(m.a.nbytes + m.b.nbytes for m in self.modules)

    def file(self, path: str) -> FileEntry:
        """Raises KeyError."""
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)

    def as_json(self) -> dict[str, Any]:
        """The surface of `verify --json` (docs/surfaces.md)."""
        return {
            "type": MANIFEST_TYPE,
            "version_digest": self.version_digest,
            "base": self.base.as_json(),
            "naming": self.naming,
            "modules": [m.as_json() for m in self.modules],
            "files": [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in self.files],
            "total_bytes": self.total_bytes,
        }

    @classmethod
    def from_json(cls, f: Mapping[str, Any]) -> Manifest:
        """The inverse of `as_json`; only for what this program wrote itself."""
        return cls(
            BasePin.from_json(f["base"]),
            tuple(ModuleEntry.from_json(m) for m in f["modules"]),
            tuple(FileEntry(e["path"], e["sha256"], e["size"]) for e in f["files"]),
            f.get("naming", PRIMARY),
        )

    @property
    def digest(self) -> str:
        """The manifest digest of the admission statement: SHA-256 over everything but `delta_norm`.

        A primary naming is left out: it is what a manifest without the word means.
        """
        body = self.as_json()
        if self.naming == PRIMARY:
            del body["naming"]
        for module in body["modules"]:
            del module["delta_norm"]
        return sha256_hex(_canonical(body))


def _canonical(body: dict[str, Any]) -> bytes:
    """RFC 8785, as `canonical_json` has it, in a tenth of the time for hundreds of modules.

    But for numbers that are no integers the standard library writes the same, given keys in ASCII. Of those,
    a manifest has two a module; repr and RFC 8785 agree from 1e-4 on, and to 2^53 an integer is one in both.
    """
    for module in body["modules"]:
        for name in ("alpha", "scaling"):
            value = module[name]
            if not 1e-4 <= abs(value) < 1 << 53:
                return canonical_json(body)
            if value == int(value):
                module[name] = int(value)
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
