"""A Llama with Llama-3.1-8B's shapes and random weights under the reference worker's loop, with clocks on it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
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


def llama(bench: Bench, layers: int) -> nn.Module:
    """bf16 on CUDA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    wide = not bench.small
    config = LlamaConfig(
        vocab_size=128_256 if wide else 128,
        hidden_size=4096 if wide else 64,
        intermediate_size=14_336 if wide else 224,
        num_hidden_layers=layers,
        num_attention_heads=32 if wide else 4,
        num_key_value_heads=8 if wide else 2,
        max_position_embeddings=4096,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if bench.cuda else torch.float32)
    try:
        with torch.device(bench.device):
            model: nn.Module = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)
    return model


def base_of(model: nn.Module) -> BaseSpec:
    return BaseSpec.from_module(model, id="benchmarks/llama-8b", revision="6" * 40)


class TimedModel(FlatModel):
    """Attributes: steps: forwards so far."""

    def __init__(self, bench: Bench, model: nn.Module, kv_blocks: int) -> None:
        self.steps, self._launching = 0, 0.0
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
        return logits

    def begin_count(self) -> None:
        self._spans, self._launching = [], 0.0

    def end_count(self) -> tuple[list[float], float]:
        """(seconds of each forward on the device, seconds of launching them), since it began."""
        if self._spans:
            self._spans[-1][1].synchronize()
        return [1e-3 * begin.elapsed_time(end) for begin, end in self._spans], self._launching

    def _event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TimedEngine:
    """Attributes: begin_seconds: of plans and of what is enqueued for them, so far."""

    def __init__(self, engine: LoRAEngine[Lease | None]) -> None:
        self._engine, self.begin_seconds = engine, 0.0

    @property
    def served(self) -> frozenset[str]:
        return self._engine.served

    def check(self, lease: Lease) -> None:
        self._engine.check(lease)

    @contextmanager
    def step(self, rows: Iterable[tuple[Lease | None, int]]) -> Iterator[object]:
        then = time.perf_counter()
        step = self._engine.step(rows)
        with step:
            self.begin_seconds += time.perf_counter() - then
            yield step


class NoEngine:
    """The worker without adapters: no plan, no hook, no kernel."""

    served: frozenset[str] = frozenset()
    begin_seconds = 0.0

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
def warm_engine(model: nn.Module, cache: AdapterCache, most_rows: int) -> Iterator[TimedEngine]:
    """An engine whose kernels are there."""
    engine: LoRAEngine[Lease | None]
    with LoRAEngine(model, cache, max_rank=MAX_RANK) as engine:
        engine.warm_up([rows for rows in ROW_BUCKETS if rows <= most_rows])
        yield TimedEngine(engine)
