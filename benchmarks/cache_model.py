"""A decoder of Llama-3.1-8B's shapes and random weights under the reference worker's loop, with clocks on it.

Its projections are fused as serving engines fuse them, q with k and v, gate with up: four linears a layer for seven of
the adapters'. The class is transformers' Phi-3, the Llama of that form.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from benchmarks.cache_adapters import llama_base, own_bytes
from benchmarks.cache_common import Bench
from torch import Tensor, nn

from adapterd.cli.worker.forward import FlatModel
from adapterd.cli.worker.graphs import runner_for
from adapterd.cli.worker.rows import ROW_BUCKETS, StepRows
from adapterd.gpu_cache import AdapterCache, Lease
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec

MAX_RANK = 64
"""Of the benchmarks' adapters: fewer kernels to compile."""
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LOOK_EVERY = 16
"""Of the steps: what adapters they have takes tens of microseconds to count."""


def llama(bench: Bench, layers: int) -> nn.Module:
    """bf16 on CUDA."""
    from transformers import Phi3Config, Phi3ForCausalLM

    wide = not bench.small
    config = Phi3Config(
        vocab_size=128_256 if wide else 128,
        hidden_size=4096 if wide else 64,
        intermediate_size=14_336 if wide else 224,
        num_hidden_layers=layers,
        num_attention_heads=32 if wide else 4,
        num_key_value_heads=8 if wide else 2,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if bench.cuda else torch.float32)
    try:
        with torch.device(bench.device):
            model: nn.Module = Phi3ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)
    return model


def base_of(bench: Bench, layers: int) -> BaseSpec:
    """The table of the adapters' seven linears."""
    return llama_base(layers, small=bench.small)


@dataclass(frozen=True)
class Counted:
    """What the clocks of a model have seen.

    Attributes:
        gpu: seconds of each forward on the device, with the choice of its tokens.
        between: seconds from each one's end to the next one's begin there.
        launching: seconds of the host, in all.
    """

    gpu: list[float]
    between: list[float]
    launching: float


class TimedModel(FlatModel):
    """Attributes: steps: forwards so far; prompts: whether the last one had rows of prompts."""

    def __init__(self, bench: Bench, model: nn.Module, kv_blocks: int) -> None:
        self.steps, self.prompts, self._launching = 0, False, 0.0
        self._cuda = bench.cuda
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        super().__init__(model, kv_blocks=kv_blocks, runner=runner_for(torch.device(bench.device)))

    def run(self, step: StepRows, launches: Hashable | None = None) -> Tensor:
        """As ever."""
        then = time.perf_counter()
        begin = self._event()
        logits = super().run(step, launches)
        end = self._event()
        if begin is not None and end is not None:
            self._spans.append((begin, end))
        self._launching += time.perf_counter() - then
        self.steps += 1
        self.prompts = len(step.ids) > len(step.counts)
        return logits

    def begin_count(self) -> None:
        self._spans, self._launching = [], 0.0

    def end_count(self) -> Counted:
        """Since it began."""
        if self._spans:
            self._spans[-1][1].synchronize()
        gpu = [1e-3 * begin.elapsed_time(end) for begin, end in self._spans]
        between = [1e-3 * one[1].elapsed_time(other[0]) for one, other in pairwise(self._spans)]
        return Counted(gpu, between, self._launching)

    def _event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TimedEngine:
    """Attributes: begin_seconds: of plans and of what is enqueued for them, so far.

    adapters: (how many, their bytes) of the steps that were looked at.
    """

    def __init__(self, engine: LoRAEngine[Lease | None]) -> None:
        self._engine, self.begin_seconds, self._steps = engine, 0.0, 0
        self.adapters: list[tuple[int, int]] = []
        self._bytes: dict[int, int] = {}

    @property
    def served(self) -> frozenset[str]:
        return self._engine.served

    def check(self, lease: Lease) -> None:
        self._engine.check(lease)

    @contextmanager
    def step(self, rows: Sequence[tuple[Lease | None, int]]) -> Iterator[object]:
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            self._look(lease for lease, _ in rows if lease is not None)
        then = time.perf_counter()
        step = self._engine.step(rows)
        with step:
            self.begin_seconds += time.perf_counter() - then
            yield step

    def _look(self, leases: Iterable[Lease]) -> None:
        residents = {resident.slot: resident for lease in leases for resident, _ in lease.composition}
        self.adapters.append((len(residents), sum(self._own(each) for each in residents.values())))

    def _own(self, resident: Any) -> int:
        """Bytes of its factors. The benchmarks' adapters of a shape share one layout."""
        key = id(resident.layout)
        if key not in self._bytes:
            self._bytes[key] = own_bytes(resident.manifest)
        return self._bytes[key]


class NoEngine:
    """The worker without adapters: no plan, no hook, no kernel."""

    served: frozenset[str] = frozenset()
    begin_seconds = 0.0
    adapters: Sequence[tuple[int, int]] = ()

    @dataclass
    class _Step(AbstractContextManager["NoEngine._Step"]):
        shape: None = None

        def __exit__(self, *_: object) -> None:
            return None

    def check(self, lease: Lease) -> None:
        """There is nothing to be served."""

    def step(self, rows: Sequence[tuple[Any, int]]) -> AbstractContextManager[NoEngine._Step]:
        return self._Step()


@contextmanager
def warm_engine(
    model: nn.Module, cache: AdapterCache, rows: Iterable[int], targets: Sequence[str] | None = None
) -> Iterator[TimedEngine]:
    """An engine, over those linears or all, whose kernels for steps of so many rows are there."""
    engine: LoRAEngine[Lease | None]
    with LoRAEngine(model, cache, STACKED, targets, max_rank=MAX_RANK) as engine:
        engine.warm_up(rows)
        yield TimedEngine(engine)


def buckets(least: int, most: int) -> list[int]:
    """The sizes that steps of so many rows are padded to."""
    return [rows for rows in ROW_BUCKETS if least <= rows <= most]
