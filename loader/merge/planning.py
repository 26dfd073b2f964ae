"""What a merge will write: three ways to it, none of which adds floats to packed integers (I20).

Plain: every file of the base byte for byte, but for the bytes of the adapted weights. Dequantised: all packed
weights become floats, adapted or not, because no loader opens a model that is half of each kind by its config.
Requantised: as plain, with the adapted weights' integers, scales and zero points made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from adapterd.loader.base_files import CONFIG_FILE, INDEX_FILE
from adapterd.loader.base_model import BaseSpec, ModuleKind
from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.formats.files import FileReader
from adapterd.loader.formats.text import shown
from adapterd.loader.manifest import Manifest
from adapterd.loader.merge import rewriting as new
from adapterd.loader.merge.delta import Delta
from adapterd.loader.merge.folder import BaseFolder, Shard
from adapterd.loader.merge.grouped import Grouped
from adapterd.loader.merge.loss import Loss
from adapterd.loader.merge.packed_rows import PackedRows, requantised
from adapterd.loader.merge.quantised import Packed, Scheme, not_understood, packed_weights, scheme_of, unsupported
from adapterd.loader.merge.shards import NewFile, NewModel, Part, Patch, copied, part_of
from adapterd.loader.merge.targets import Target, check_shape, find_targets
from adapterd.loader.merge.tiles import TILE_VALUES, PlainRows, merged

Mode = Literal["plain", "dequantized", "requantized"]
FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Wish:
    """How to treat a quantised base: not at all, as floats of this dtype, or in its own scheme again."""

    dequantize: str | None = None
    requantize: bool = False
    tile_values: int = TILE_VALUES


@dataclass(frozen=True, slots=True)
class Plan:
    """One merge, ready to be written.

    Attributes:
        scheme: how the base is quantised.
        tensors: by adapted module, the tensor of the merged model that has its weight.
        dtypes: by adapted module, what the merged weight is stored in.
        losses: by adapted module, what rounding took; filled while the model is written.
        left_out: files of the base that the merged model does not get.
    """

    mode: Mode
    scheme: Scheme | None
    model: NewModel
    tensors: Mapping[str, str]
    dtypes: Mapping[str, str]
    losses: Mapping[str, Loss]
    left_out: tuple[str, ...]


def plan_merge(base: BaseFolder, spec: BaseSpec, manifest: Manifest, weights: FileReader, wish: Wish) -> Plan:
    """Find every weight and decide, before a byte is written.

    Args:
        spec: the base's table, which `manifest` is for.
        weights: the adapter's tensor file.

    Raises:
        Refused: DTYPE_UNSUPPORTED where an adapted weight is packed and `wish` says neither; UNSUPPORTED_FEATURE,
            UNKNOWN_MODULE, SHAPE_MISMATCH.
        Failed: REQUEST_INVALID for a wish about a base that is not quantised.
    """
    scheme = scheme_of(base.config)
    targets = find_targets(manifest, spec, base.config, base.tensors)
    if scheme is None and (wish.dequantize or wish.requantize):
        raise error(Code.REQUEST_INVALID, CONFIG_FILE, "the base is not quantised", "Leave the option out.")
    merging = _Merging(base, spec, targets, weights, wish, scheme)
    if wish.dequantize:
        return merging.dequantised(wish.dequantize)
    if wish.requantize:
        return merging.requantised()
    return merging.plain()


@dataclass
class _Merging:
    base: BaseFolder
    spec: BaseSpec
    targets: Mapping[str, Target]
    weights: FileReader
    wish: Wish
    scheme: Scheme | None
    losses: dict[str, Loss] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    # ---------------------------------------------------------- plain

    def plain(self) -> Plan:
        for path, target in self.targets.items():
            self._refuse_packed(path, target)
        files = [self._merged_shard(shard) for shard in self.base.shards.values()]
        return self._plan("plain", NewModel((*files, *self._others())))

    def _refuse_packed(self, path: str, target: Target) -> None:
        tensors = self.base.tensors
        if self.scheme is None and f"{path}.weight" in tensors:
            return  # its dtype is judged with its shape
        plain = tensors.get(f"{path}.weight")
        if plain is None or plain.entry.dtype not in {"F64", *FLOATS}:
            raise _packed_refusal(target, self.scheme)

    def _merged_shard(self, shard: Shard) -> NewFile:
        parts = [part_of(shard.reader, 0, shard.data_start)]
        for stored in shard.tensors:
            path, _, last = stored.entry.name.rpartition(".")
            target = self.targets.get(path) if last == "weight" else None
            if target is None:
                parts.append(part_of(shard.reader, stored.entry.begin, stored.entry.end))
            else:
                check_shape(target, stored)
                parts.append(self._merged(target, PlainRows(stored), stored.entry.dtype))
        return NewFile(shard.name, shard.reader.size, tuple(parts))

    def _merged(self, target: Target, rows: PlainRows | PackedRows, dtype: str) -> Part:
        loss = self._noted(target, rows.name, dtype)
        delta = self._delta(target, transposed=target.transposed, exact=dtype == "F64")
        return partial(merged, rows, delta, dtype, loss, self.wish.tile_values)

    def _noted(self, target: Target, tensor: str, dtype: str) -> Loss:
        name = target.module.name
        self.tensors[name], self.dtypes[name] = tensor, dtype
        return self.losses.setdefault(name, Loss())

    def _delta(self, target: Target, *, transposed: bool, exact: bool = False) -> Delta:
        return Delta(target.module, self.weights, transposed=transposed, exact=exact, tile_values=self.wish.tile_values)

    # ---------------------------------------------------------- in floats

    def dequantised(self, dtype: str) -> Plan:
        packed = self._packed()
        made = {name: list(self._floats(shard, packed, dtype)) for name, shard in self.base.shards.items()}
        files = [new.rewritten(shard, made[name]) for name, shard in self.base.shards.items()]
        index = [new.new_index(self.base, made)] if INDEX_FILE in self.base.others else []
        dropped = (CONFIG_FILE, INDEX_FILE, *new.QUANTISERS_FILES)
        others = [f for f in self._others() if f.name not in dropped]
        model = NewModel((*files, *others, *index, new.new_config(self.base, dtype)))
        gone = sorted(new.QUANTISERS_FILES & self.base.others.keys())
        return self._plan("dequantized", model, *gone)

    def _packed(self) -> Mapping[str, Packed]:
        assert self.scheme is not None
        return packed_weights(self.scheme, self.base.tensors)

    def _floats(self, shard: Shard, packed: Mapping[str, Packed], dtype: str) -> Iterator[new.NewTensor]:
        inside = {t.entry.name for weight in packed.values() for t in weight.parts}
        for stored in shard.tensors:
            path, _, last = stored.entry.name.rpartition(".")
            if stored.entry.name in inside:
                if stored.entry.name == packed[path].leading.entry.name:
                    yield self._unpacked(path, packed[path], dtype)
            elif last == "weight" and path in self.targets:
                target = self.targets[path]
                check_shape(target, stored)
                part = self._merged(target, PlainRows(stored), stored.entry.dtype)
                yield new.NewTensor(
                    stored.entry.name, stored.entry.dtype, stored.entry.shape, stored.entry.nbytes, part
                )
            else:
                yield new.kept(stored.entry, shard.reader)

    def _unpacked(self, path: str, weight: Packed, dtype: str) -> new.NewTensor:
        target = self.targets.get(path)
        transposed = target.transposed if target else self._is_conv1d(path)
        rows = PackedRows(f"{path}.weight", weight, transposed=transposed)
        if target is None:
            part: Part = partial(merged, rows, None, dtype, Loss(), self.wish.tile_values)
        else:
            self._must_be_wide(target, weight)
            part = self._merged(target, rows, dtype)
        return new.floats(rows.name, dtype, rows.shape, part)

    def _is_conv1d(self, path: str) -> bool:
        entries = (m for m in self.spec.modules if m.kind is ModuleKind.CONV1D)
        return any(path == e.path or path.endswith(f".{e.path}") or e.path.endswith(f".{path}") for e in entries)

    @staticmethod
    def _must_be_wide(target: Target, weight: Packed) -> None:
        wanted = (target.module.out_features, target.module.in_features)
        if weight.shape != wanted:
            message = f"its packed weight is {list(weight.shape)}, wanted {list(wanted)}"
            raise error(Code.SHAPE_MISMATCH, shown(target.module.name), message)

    # ---------------------------------------------------------- in its own scheme

    def requantised(self) -> Plan:
        packed = self._packed()
        patches = [self._requantised(path, packed[path]) for path in sorted(self.targets.keys() & packed.keys())]
        files = [self._merged_shard(shard) for shard in self.base.shards.values()]
        return self._plan("requantized", NewModel((*files, *self._others()), tuple(patches)))

    def _requantised(self, path: str, weight: Packed) -> Callable[[], Iterator[Patch]]:
        target = self.targets[path]
        assert self.scheme is not None
        if not isinstance(weight, Grouped):
            raise unsupported(self.scheme, "requantising with it")
        self._must_be_wide(target, weight)
        loss = self._noted(target, weight.leading.entry.name, self.scheme.words)
        delta = self._delta(target, transposed=False)
        return partial(requantised, weight, delta, loss, self.wish.tile_values)

    # ---------------------------------------------------------- all of them

    def _others(self) -> list[NewFile]:
        return [copied(name, reader) for name, reader in self.base.others.items()]

    def _plan(self, mode: Mode, model: NewModel, *dropped: str) -> Plan:
        left_out = tuple(sorted((*self.base.left_out, *dropped)))
        return Plan(mode, self.scheme, model, self.tensors, self.dtypes, self.losses, left_out)


def _packed_refusal(target: Target, scheme: Scheme | None) -> AdapterdError:
    how = scheme.words if scheme else "config.json does not say how"
    hint = "Merge into the model that it was quantised from, in bfloat16 or float32."
    if scheme and not_understood(scheme) is None:
        hint = "--dequantize bf16 writes all weights as floats, --requantize the merged ones in the base's own scheme."
    return error(
        Code.DTYPE_UNSUPPORTED, shown(target.module.name),
        f"is quantised ({shown(how, 60)}): floats are not added to packed integers", hint,
    )  # fmt: skip
