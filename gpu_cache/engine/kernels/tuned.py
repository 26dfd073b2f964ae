"""Tuning tables: configurations that were measured on one card, as data, in JSON.

    {"type": "adapterd.kernel-configs/1", "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "entries": [
      {"regime": "tiles", "in_features": 4096, "out_features": 28672, "slices": 2, "lanes": 64, "rows": 2048,
       "item_bytes": 2, "us": 91.2, "rule_us": 96.0, "config": {"split": 4, "lanes": 64, …}} …]}

`lanes` are rank lanes a slice, `item_bytes` those of the wider of x and the adapter; `us` is what the linear took
when it was tuned, `rule_us` what it took by the rule. An entry answers for its own shape and, where there is no
nearer one, for shapes of the same linear with up to twice as many or few lanes (in the regime of rows, as few) and
four times as many or few rows; the rule (`configs`) answers for the rest. The tables in `tables/` are looked up by
the card's name. A user's own is taken whatever card it names: its entries are slow elsewhere at worst, never wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from adapterd.gpu_cache.engine.device_plan import Regime
from adapterd.gpu_cache.engine.kernels.configs import Configs, Key, RowsConfig, Rule, TilesConfig, one_stage, tile_rows
from adapterd.loader.errors import Code, error
from adapterd.loader.formats.json_strict import JsonRules, parse_object
from adapterd.loader.formats.text import shown
from adapterd.loader.store_folder import read_small

TYPE = "adapterd.kernel-configs/1"
TABLES = Path(__file__).with_name("tables")
MAX_BYTES = 4 << 20
MAX_ENTRIES = 8192
MAX_STAGE_BYTES = 96 << 10
"""Of one stage: it has to fit into the shared memory of any card."""
_BAD = Code.SETTINGS_INVALID
_HINT = "Make one with `adapterctl bench kernels --tune --out FILE`."

_MOST: Mapping[str, int] = {
    "split": 16, "block_k": 4096, "block_n": 4096, "lanes": 256, "walk": 64, "shrink_warps": 16, "expand_warps": 16,
}  # fmt: skip
_LEAST: Mapping[str, int] = {"block_k": 16, "block_n": 16, "lanes": 16}
_MOST_OF_A_WARP = 512
_MOST_STAGES = 8
_MOST_TILE = 512
"""Of `block_k` and `block_n` where both operands of a product stand in shared memory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured configuration.

    Attributes:
        item_bytes: of the wider of x and the adapter.
        us: of the linear, as tuned.
        rule_us: of the same by the rule, in the same run.
    """

    key: Key
    item_bytes: int
    config: RowsConfig | TilesConfig
    us: float
    rule_us: float

    @property
    def regime(self) -> Regime:
        return Regime.ROWS if isinstance(self.config, RowsConfig) else Regime.TILES

    @property
    def linear(self) -> Linear:
        """What must be the same for an entry to answer."""
        in_features, out_features, slices, _, rows = self.key
        return _linear(self.regime, (in_features, out_features, slices), rows, self.item_bytes)


Linear = tuple[Regime, tuple[int, int, int], int, int]


def _linear(regime: Regime, widths: tuple[int, int, int], rows: int, item_bytes: int) -> Linear:
    return regime, widths, tile_rows(rows) if regime is Regime.TILES else 1, item_bytes


@dataclass(frozen=True)
class Table:
    """What a file says."""

    device: str
    torch: str
    triton: str
    entries: tuple[Entry, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "type": TYPE, "device": self.device, "torch": self.torch, "triton": self.triton,
            "entries": [_entry_json(entry) for entry in self.entries],
        }  # fmt: skip

    def text(self) -> str:
        """One line an entry."""
        head = {**self.as_json(), "entries": 0}
        lines = ",\n".join(f"  {json.dumps(_entry_json(entry))}" for entry in self.entries)
        return json.dumps(head, indent=1).replace('"entries": 0', f'"entries": [\n{lines}\n ]') + "\n"


class Tuned:
    """A table's entries, and the rule for what they do not answer."""

    def __init__(self, entries: Iterable[Entry], rule: Configs | None = None) -> None:
        self._rule: Configs = Rule() if rule is None else rule
        self._by_linear: dict[Linear, list[Entry]] = {}
        for entry in entries:
            self._by_linear.setdefault(entry.linear, []).append(entry)

    def rows(self, key: Key, item_bytes: int) -> RowsConfig:
        found = self._nearest(Regime.ROWS, key, item_bytes)
        return found if isinstance(found, RowsConfig) else self._rule.rows(key, item_bytes)

    def tiles(self, key: Key, item_bytes: int, *, batch_invariant: bool) -> TilesConfig:
        """The rule's alone if `batch_invariant`: an entry's parts of K hold for some numbers of rows only."""
        found = None if batch_invariant else self._nearest(Regime.TILES, key, item_bytes)
        if isinstance(found, TilesConfig):
            return found
        return self._rule.tiles(key, item_bytes, batch_invariant=batch_invariant)

    def _nearest(self, regime: Regime, key: Key, item_bytes: int) -> RowsConfig | TilesConfig | None:
        in_features, out_features, slices, lanes, rows = key
        among = self._by_linear.get(_linear(regime, (in_features, out_features, slices), rows, item_bytes), ())
        near = [(far, entry) for entry in among if (far := _distance(entry, lanes, rows)) is not None]
        if not near:
            return None
        return min(near, key=lambda pair: (pair[0], pair[1].key))[1].config


def _distance(entry: Entry, lanes: int, rows: int) -> float | None:
    """In octaves of lanes and half octaves of rows; None if it is too far to answer.

    A strip that was chosen for few lanes overflows the registers with more of them, many times slower: for rows one
    by one, whose lanes stand in registers, an entry answers for fewer lanes only.
    """
    wider = math.log2(entry.key[3] / lanes)
    of_lanes, of_rows = abs(wider), abs(math.log2(rows / entry.key[4])) / 2
    if max(of_lanes, of_rows) > 1 or (entry.regime is Regime.ROWS and wider < 0):
        return None
    return of_lanes + of_rows


def configs_for(device: str, own: Path | None = None) -> Configs:
    """The configurations for the card of this name: of the file `own` if given, else of the table that is shipped.

    Raises:
        Failed: SETTINGS_INVALID, the file is no such table. NotFound: PATH_NOT_FOUND.
    """
    if own is not None:
        return Tuned(load(own).entries)
    path = TABLES / f"{slug(device)}.json"
    return Tuned(load(path).entries) if path.is_file() else Rule()


def slug(device: str) -> str:
    """`NVIDIA H200` → `nvidia-h200`: the name of its table's file."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def load(path: Path) -> Table:
    """Raises Failed (SETTINGS_INVALID) for what is no table; NotFound (PATH_NOT_FOUND) for what cannot be read."""
    try:
        data = read_small(path, MAX_BYTES)
    except OSError as fault:
        raise error(Code.PATH_NOT_FOUND, str(path), f"cannot be read: {fault.strerror}") from None
    if data is None:
        raise error(Code.PATH_NOT_FOUND, str(path), "there is no such tuning table", _HINT)
    return parse(data, str(path))


def parse(data: bytes, where: str) -> Table:
    """A table, every field of it checked.

    Raises:
        Failed: SETTINGS_INVALID.
    """
    rules = JsonRules(
        where=where, max_bytes=MAX_BYTES, max_depth=4, max_values=32 * MAX_ENTRIES,
        invalid=_BAD, duplicate=_BAD, too_deep=_BAD, too_large=_BAD, too_many=_BAD, bad_number=_BAD,
    )  # fmt: skip
    found = parse_object(data, rules)
    _check_fields(found, ("type", "device", "torch", "triton", "entries"), where)
    if found["type"] != TYPE:
        raise _bad(where, f"its type is {shown(found['type'], 60)!r}, not {TYPE!r}")
    device, torch, triton = (_text(found, name, where) for name in ("device", "torch", "triton"))
    if not isinstance(found["entries"], list) or len(found["entries"]) > MAX_ENTRIES:
        raise _bad(where, f"`entries` is not a list of up to {MAX_ENTRIES}")
    entries = tuple(_entry(fields, f"{where}: entries[{i}]") for i, fields in enumerate(found["entries"]))
    _check_once(entries, where)
    return Table(device, torch, triton, entries)


# --- one entry

_WIDTHS = ("in_features", "out_features", "slices", "lanes", "rows")


def _entry(found: object, where: str) -> Entry:
    found = _object(found, ("regime", *_WIDTHS, "item_bytes", "us", "rule_us", "config"), where)
    if found["regime"] not in ("rows", "tiles"):
        raise _bad(where, f"the regime {shown(found['regime'], 40)!r} is neither rows nor tiles")
    in_features, out_features, slices, lanes, rows = (_whole(found, name, 1, 1 << 24, where) for name in _WIDTHS)
    item_bytes = _whole(found, "item_bytes", 2, 4, where)
    kind = RowsConfig if found["regime"] == "rows" else TilesConfig
    config = _config(kind, found["config"], where)
    if max(one_stage(config, item_bytes, tile_rows(rows)), default=0) > MAX_STAGE_BYTES:
        raise _bad(where, f"one stage takes more than {MAX_STAGE_BYTES} bytes of shared memory")
    key = (in_features, out_features, slices, lanes, rows)
    return Entry(key, item_bytes, config, _time(found, "us", where), _time(found, "rule_us", where))


def _config(kind: type[RowsConfig | TilesConfig], found: object, where: str) -> RowsConfig | TilesConfig:
    names = [field.name for field in fields(kind)]
    found = _object(found, names, f"{where}.config")
    config = kind(**{name: _setting(kind, found, name, f"{where}.config") for name in names})
    if isinstance(config, RowsConfig):
        for size, warps in ((config.block_k, config.shrink_warps), (config.block_n, config.expand_warps)):
            if size > _MOST_OF_A_WARP * warps:
                raise _bad(where, f"{size} elements are too many for {warps} warps: it would take minutes to compile")
    return config


def _setting(kind: type[object], found: Mapping[str, Any], name: str, where: str) -> int:
    if name.endswith("stages"):
        return _whole(found, name, 1, _MOST_STAGES, where)
    most = _MOST_TILE if kind is TilesConfig and name.startswith("block") else _MOST[name]
    value = _whole(found, name, _LEAST.get(name, 1), most, where)
    if value & (value - 1):
        raise _bad(where, f"{name} is {value}, no power of two")
    return value


def _entry_json(entry: Entry) -> dict[str, object]:
    key = dict(zip(_WIDTHS, entry.key, strict=True))
    times = {"us": round(entry.us, 3), "rule_us": round(entry.rule_us, 3)}
    return {
        "regime": str(entry.regime), **key, "item_bytes": entry.item_bytes, **times, "config": asdict(entry.config)
    }  # fmt: skip


# --- fields


def _object(found: object, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _bad(where, "is no object")
    _check_fields(found, names, where)
    return found


def _check_fields(found: Mapping[str, object], names: Sequence[str], where: str) -> None:
    for name in names:
        if name not in found:
            raise _bad(where, f"the field {name!r} is missing")
    if unknown := sorted(found.keys() - {*names}):
        raise _bad(where, f"the field {shown(unknown[0], 60)!r} is unknown")


def _whole(found: Mapping[str, Any], name: str, least: int, most: int, where: str) -> int:
    value = found[name]
    if type(value) is not int or not least <= value <= most:
        raise _bad(where, f"{name} is {shown(value, 40)}, not a whole number from {least} to {most}")
    return value


def _time(found: Mapping[str, Any], name: str, where: str) -> float:
    value = found[name]
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise _bad(where, f"{name} is {shown(value, 40)}, no number of µs")
    return float(value)


def _text(found: Mapping[str, Any], name: str, where: str) -> str:
    value = found[name]
    if not isinstance(value, str) or len(value) > 200:
        raise _bad(where, f"{name} is no short text")
    return value


def _check_once(entries: Iterable[Entry], where: str) -> None:
    seen: set[object] = set()
    for entry in entries:
        name = (entry.regime, entry.key, entry.item_bytes)
        if name in seen:
            raise _bad(where, f"the shape {entry.key} stands in two entries of {entry.regime}")
        seen.add(name)


def _bad(where: str, message: str) -> Exception:
    return error(_BAD, where, message, _HINT)
