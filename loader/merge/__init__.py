"""Offline merge: a base and one adapter into a model of its own, shard by shard, in bounded memory.

Rooms, from the bytes up: `matrices` (blocks of stored tensors), `delta` (scaling · B A), `tiles` (a weight, tile by
tile) with `loss` (what rounding takes), `packing`, `grouped`, `fp8`, `quantised`, `packed_rows` (packed weights),
`folder` (the base's files), `targets` (whose weight lies where), `shards` and `rewriting` (files to write),
`planning` (the decision), `output` (a folder that appears whole).
"""

from adapterd.loader.merge.folder import BaseFolder, opened_base
from adapterd.loader.merge.output import new_folder
from adapterd.loader.merge.planning import Plan, Wish, plan_merge

__all__ = ["BaseFolder", "Plan", "Wish", "new_folder", "opened_base", "plan_merge"]
