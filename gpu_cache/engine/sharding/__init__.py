"""The engine on one rank of a tensor-parallel group (I21): `docs/tensor_parallel.md`."""

from adapterd.gpu_cache.engine.sharding.placements import sharding_of

__all__ = ["sharding_of"]
