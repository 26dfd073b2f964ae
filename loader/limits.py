"""Caps on what a stranger may make us read, hold or serve: a frozen set with the source of each number.

All of them are checked from sizes and headers, before memory or storage is committed (I7).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from adapterd.loader.errors import Code, error

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """One set of caps. Sizes in bytes, unless the name says otherwise.

    Attributes:
        max_rank: largest rank of a module. PEFT's published adapters stay at 256 and below; twice that.
        max_modules: adapted modules in a version (Llama-405B has 126 layers × 7 linears = 882).
        max_tensors: tensors in the file; 65,536, forty times a large dense adapter's.
        max_header_bytes: safetensors header; the library's own cap is 100 MB, 46,000 names need 6 MB.
        max_config_bytes: `adapter_config.json`; real ones are 1 to 30 KB.
        max_json_depth: nesting of a config or header.
        max_name_bytes: a tensor's name.
        max_metadata_bytes: the `__metadata__` of the tensor file.
        max_dim: one dimension of a tensor; the largest vocabulary in use is about 260,000.
        max_files: files in a package.
        max_archive_entries: entries in a zip or tar.
        max_unpacked_bytes: what an archive may unpack to.
        max_unpack_ratio: unpacked bytes per packed one; deflate reaches 1032, trained values 1.1, a zero B 2.
        max_total_bytes: a version's stored files together.
        max_signature_bytes: `model.sig`; the payload of an OMS bundle is capped at 1 MiB, base64 adds a third.
        allowed_target_modules: last name parts that may be adapted, or None for any.
    """

    max_rank: int = 512
    max_modules: int = 4096
    max_tensors: int = 65_536
    max_header_bytes: int = 16 * MIB
    max_config_bytes: int = MIB
    max_json_depth: int = 64
    max_name_bytes: int = 512
    max_metadata_bytes: int = 65_536
    max_dim: int = 1 << 20
    max_files: int = 64
    max_archive_entries: int = 1000
    max_unpacked_bytes: int = 16 << 30
    max_unpack_ratio: int = 200
    max_total_bytes: int = 16 << 30
    max_signature_bytes: int = 2 * MIB
    allowed_target_modules: tuple[str, ...] | None = None

    @classmethod
    def from_json(cls, values: dict[str, object]) -> Limits:
        """The defaults, overridden by `values`.

        Raises:
            Failed: SETTINGS_INVALID for an unknown name or a value that is no positive integer.
        """
        known = {f.name for f in fields(cls)}
        checked: dict[str, int | tuple[str, ...] | None] = {}
        for name, value in values.items():
            if name not in known:
                raise error(
                    Code.SETTINGS_INVALID,
                    f"limits.{name}",
                    "unknown limit",
                    f"Known: {', '.join(sorted(known))}.",
                )
            checked[name] = _checked(name, value)
        return replace(cls(), **checked)  # type: ignore[arg-type]

    def as_json(self) -> dict[str, object]:
        """Plain values, for the admission statement and for `from_json`."""
        values = asdict(self)
        if self.allowed_target_modules is not None:
            values["allowed_target_modules"] = list(self.allowed_target_modules)
        return values


def _checked(name: str, value: object) -> int | tuple[str, ...] | None:
    where = f"limits.{name}"
    if name == "allowed_target_modules":
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(v, str) and v for v in value):
            return tuple(value)
        raise error(Code.SETTINGS_INVALID, where, "must be null or a list of names")
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise error(Code.SETTINGS_INVALID, where, f"must be a positive integer, not {value!r}")


DEFAULT_LIMITS = Limits()
