"""The reference worker over a folder of signed adapters, and what each request must give on merged weights."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from adapterd.cli.worker.forward import FlatModel
from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.models import TINY_ID, TINY_REVISION, tiny_model
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.requests import Ended, Event, Request, Token, Wish
from adapterd.cli.worker.rows import StepRows
from adapterd.cli.worker.tally import Progress
from adapterd.gpu_cache import AdapterCache, CacheConfig, LeaseState
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.sources import Source
from fakes.packages import WrittenPackage
from fakes.publisher import FolderPublisher

MIB = 1 << 20
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 2e-4
"""Of logits up to about 5 in float32, against float64."""
PATIENCE = 1 << 24
"""Steps before a test gives up on a loader thread."""

Part = tuple[WrittenPackage, float, float]
"""(package, scaling, weight)"""


class RecordingModel(FlatModel):
    """Keeps what the last forward gave: (tokens of the sequence by then, logits behind them), in row order. And the
    token ids of all, as they were handed in."""

    last: tuple[tuple[int, Tensor], ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()

    def run(self, step: StepRows, launches: Hashable | None = None) -> Tensor:
        self.ids = (*self.ids, tuple(step.ids))
        logits = super().run(step, launches).clone()
        rows = zip(step.sequences, logits.cpu(), strict=True)
        self.last = tuple((kv.length, row) for (_, kv), row in rows)
        return logits


class WorkerWorld:
    """Model, publisher, cache, engine and loop; leaving it checks that everything came back."""

    def __init__(
        self,
        root: Path,
        *,
        wrap: Callable[[Source], Source] = lambda source: source,
        targets: Sequence[str] | None = None,
        vram: int = 8 * MIB,
        device: str = "cpu",
        flat: Mapping[str, Any] | None = None,
        engine: type[LoRAEngine[Any]] = LoRAEngine,
        **loop: Any,
    ) -> None:
        self.model = tiny_model().to(device)
        self.plain = tiny_model()
        self.base = BaseSpec.from_module(self.model, id=TINY_ID, revision=TINY_REVISION)
        self.publisher = FolderPublisher(root / "published", self.base)
        self.flat = RecordingModel(self.model, **(flat or {}))
        self.prefix: PrefixCache = loop.pop("prefix", None) or PrefixCache(0)
        self._stack, self._targets, self._engine, self._loop_options = ExitStack(), targets, engine, loop
        self.cache = AdapterCache(
            CacheConfig(device=device, vram_bytes=vram, host_bytes=8 * MIB),
            base=self.base, source=wrap(self.publisher.source), trust=self.publisher.trust,
        )  # fmt: skip
        self.events: dict[str, list[Event]] = defaultdict(list)
        self._merged: dict[tuple[tuple[int, float, float], ...], nn.Module] = {}

    def __enter__(self) -> Self:
        self._stack.callback(self.flat.close)
        self._stack.enter_context(self.cache)
        self.engine = self._stack.enter_context(self._engine(self.model, self.cache, targets=self._targets))
        self.loop = self._stack.enter_context(
            ServingLoop(self.flat, self.engine, self.cache, prefix=self.prefix, **self._loop_options)
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.loop.close()
        if kind is None:
            self.check_clean()
        self._stack.close()

    # Requests

    def ask(self, name: str, wish: Wish = None, prompt: Sequence[int] = (1, 2, 3), most: int = 4, **more: Any) -> None:
        """Submits a request for the tenant that its first REF names; `more` as of `Request`."""
        first = wish if isinstance(wish, str) else wish[0][0] if wish else "acme/"
        more.setdefault("tenant", first.partition("/")[0])
        request = Request(name, wish=wish, prompt=list(prompt), max_tokens=most, **more)
        self.loop.submit(request, self.events[name].append)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until nothing is left to do, or something is so."""
        for _ in range(PATIENCE):
            if until() or self.loop.step() is Progress.IDLE:
                return
        raise AssertionError("the loop does not come to an end")

    def tokens(self, name: str) -> list[int]:
        """What it has generated so far."""
        return [event.token for event in self.events[name] if isinstance(event, Token)]

    def ended(self, name: str) -> Ended:
        """Its last event, which must be the only one of its kind."""
        *before, last = self.events[name]
        assert isinstance(last, Ended) and all(isinstance(event, Token) for event in before), self.events[name]
        assert last.tokens == len(before)
        return last

    def answer(self, wish: Wish, prompt: Sequence[int], most: int = 4, **more: Any) -> list[int]:
        """A request alone, from start to end."""
        name = f"alone-{len(self.events)}"
        self.ask(name, wish, prompt, most, **more)
        self.run()
        assert self.ended(name).reason in {"length", "stop"}, self.ended(name)
        return self.tokens(name)

    # What must come out

    def merged(self, parts: Sequence[Part]) -> nn.Module:
        """A float64 model with these parts merged into its weights."""
        key = tuple((id(package), scaling, weight) for package, scaling, weight in parts)
        if key not in self._merged:
            model = copy.deepcopy(self.plain).double()
            for package, scaling, weight in parts:
                for path, (a, b) in package.factors.items():
                    change = weight * scaling * (b.astype(np.float64) @ a.astype(np.float64))
                    model.get_submodule(path).weight += torch.from_numpy(change)
            self._merged[key] = model
        return self._merged[key]

    def logits(self, parts: Sequence[Part], tokens: Sequence[int]) -> Tensor:
        """Behind each token, [tokens, vocabulary], in float64, without any cache."""
        with torch.inference_mode():
            found: Tensor = self.merged(parts)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found

    def check_greedy(self, prompt: Sequence[int], got: Sequence[int], parts: Sequence[Part]) -> None:
        """Each of `got` is what the merged model says after the prompt and the ones before it."""
        if not got:
            return
        wanted = self.logits(parts, [*prompt, *got])[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert list(got) == wanted

    def check_held(self, leases: int) -> None:
        """So many leases hold something; with none, no keys and values and no step either."""
        told, loop = self.cache.statistics(), self.loop.statistics()
        empty = {LeaseState.RELEASED, LeaseState.PAUSED}
        live = sum(n for state, n in told.leases.items() if state not in empty)
        assert (live, told.leaked_leases, told.steps_in_flight) == (leases, 0, 0)
        assert leases or loop.kv_bytes == 0

    def check_clean(self) -> None:
        """Nothing is open and nothing is held."""
        self.check_held(0)
        assert self.cache.statistics().leases.get(LeaseState.PAUSED, 0) == 0
        assert sum(self.loop.statistics().open.values()) == 0
