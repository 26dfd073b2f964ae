"""What a step of the reference worker costs the CPU, part by part, over a model that computes nothing. No GPU.

    python -m benchmarks.worker_loop             # prints µs a step; a minute
    python -m benchmarks.worker_loop --profile   # one kind of callers under cProfile, too

The loop is C8's: 64 seats, prompts of 64 tokens, answers of 64 to 192, Zipf 1.0 over 2,000 adapters of ranks 8 to 64,
all in VRAM. The engine has its kernels (never run: the interpreter is there so that it opens), with the seven linears
of 32 layers, narrow ones: neither a plan nor the loop depends on widths. So what is left is Python: the loop's, the
cache's and the engine's. `none` is the loop without an engine. Times are means of steps, by the clock.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from benchmarks.cache_adapters import MadeUpLoader, Shape
from benchmarks.cache_common import Bench
from benchmarks.cache_model import NoEngine, TimedEngine, TimedModel
from benchmarks.cache_requests import Callers, refs_of, zipf
from benchmarks.cache_worlds import loaded
from torch import Tensor, nn

from adapterd.cli.worker.attention import KEYWORD, Heads, OneSequence
from adapterd.gpu_cache import AdapterCache, CacheConfig, open_device
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS, WIDTH, VOCABULARY = 32, 16, 512
RANKS = (8, 16, 32, 64)
PAGE, MANY, KV_BLOCKS = 1 << 14, 2000, 4096


class Nothing(nn.Module):
    """A causal LM in transformers' form, whose logits are known beforehand and whose layers never run."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for name in LINEARS})
            for _ in range(LAYERS)
        )
        text = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=4096)
        self.config = SimpleNamespace(_attn_implementation="none", get_text_config=lambda: text)
        self._logits = torch.arange(512 * VOCABULARY).remainder(VOCABULARY).float().view(1, 512, VOCABULARY)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor | None = None, **more: Any) -> SimpleNamespace:
        batch = more.get(KEYWORD)
        if isinstance(batch, OneSequence):
            token = torch.zeros(1, 1, 2, 8)
            batch.attend(Heads(0, token, token, token, None, None))
        rows = input_ids.shape[1] if logits_to_keep is None else len(logits_to_keep)
        return SimpleNamespace(logits=self._logits[:, :rows])


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="", help="none, base, 5 or 2000")
    parser.add_argument("--steps", type=int, default=1500)
    asked = parser.parse_args()
    bench = Bench("cpu", False, Path(tempfile.gettempdir()), LAYERS)
    with ExitStack() as stack:
        for name, callers in _callers(bench, stack).items():
            if asked.profile and name != asked.profile:
                continue
            callers.serve(seconds=60, steps=300)
            with cProfile.Profile() as profile:
                if not asked.profile:
                    profile.disable()
                served = callers.serve(seconds=120, steps=asked.steps)
            walls = sorted(served.walls)
            steps = len(walls)
            print(
                f"{name:>9}: step p50 {1e6 * walls[steps // 2]:.0f} mean {1e6 * sum(walls) / steps:.0f} µs; "
                f"engine begins {1e6 * served.begin_seconds / steps:.0f}, "
                f"model {1e6 * served.model_seconds / steps:.0f}; {served.rows / steps:.1f} rows",
                flush=True,
            )
            if asked.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return 0


def _callers(bench: Bench, stack: ExitStack) -> dict[str, Callers]:
    model = Nothing()
    flat = TimedModel(bench, model, KV_BLOCKS)
    stack.callback(flat.close)
    base = BaseSpec.from_module(model, id="bench/loop", revision="f" * 40)
    loader = MadeUpLoader(base, [Shape(RANKS[i % 4]) for i in range(MANY)], PAGE)
    cache = stack.enter_context(_cache(loader))
    engine = stack.enter_context(LoRAEngine(model, cache, kernels="triton", max_rank=64))
    refs = [version.pinned for version in loader.versions]
    for begin in range(0, MANY, 16):
        for lease in loaded(cache, refs[begin : begin + 16]):
            lease.release()
    bench.say(f"{MANY} adapters are there")
    timed = TimedEngine(engine)
    wanted: dict[str, tuple[TimedEngine | NoEngine, Iterator[str | None]]] = {
        "none": (NoEngine(), repeat(None)),
        "base": (timed, repeat(None)),
        "5": (timed, refs_of(zipf(5, 3), refs)),
        "2000": (timed, refs_of(zipf(MANY, 3), refs)),
    }
    kinds = {name: Callers(bench, flat, by, cache, names) for name, (by, names) in wanted.items()}
    for callers in kinds.values():
        stack.callback(callers.close)
    return kinds


def _cache(loader: MadeUpLoader) -> AdapterCache:
    from fakes.cache_world import host_over

    nbytes = loader.pages * PAGE
    config = CacheConfig(device="cpu", page_bytes=PAGE, vram_bytes=nbytes, host_bytes=64 << 20, max_residents=MANY)
    device = open_device("cpu")
    return AdapterCache(config, base=loader.base, host=host_over(loader, config, device), device=device)


if __name__ == "__main__":
    raise SystemExit(main())
