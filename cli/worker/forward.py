"""The model as the loop sees it: rows of many sequences in, the logits behind each sequence's last row out."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adapterd.cli.worker.attention import KEYWORD, NAME, Attended, OneSequence, attend
from adapterd.cli.worker.batch import FlatBatch
from adapterd.cli.worker.graphs import Launched, Runner
from adapterd.cli.worker.inputs import StaticInputs, made_for
from adapterd.cli.worker.kv import KeyValuePool, KeyValues
from adapterd.cli.worker.rows import ROW_BUCKETS, Bucket, Rows, StepRows, lasts_of
from adapterd.cli.worker.sampling import Page, Verdict, judge
from adapterd.loader.errors import Code, error

KV_BLOCKS = 4096
PROBE_TOLERANCE = 1e-3
"""Of the largest logit, between a flat forward and the model's own; float32's noise is far below it."""
PROBE_ROUNDINGS = 8
"""The same in roundings of the model's dtype, where that is coarser."""
_PROBE = ((3, 1, 2), (1,))
_FORM = (1, 1)
PAGES = 3
"""Verdicts that may be under way at once, and one to spare: a step is launched before the one before it lands."""


class FlatModel:
    """A transformers causal LM whose attention takes flat batches (see `attention`). `close` undoes that.

    Attributes:
        vocabulary: token ids are below it.
        positions: tokens of one sequence at most.
        runner: runs the steps that are padded to a bucket.

    Args:
        model: in evaluation mode, on its device.
        kv_blocks: blocks of keys and values for all sequences together; they are allocated now.
        runner: else every step is launched.
        most_rows: of a step that is padded to a bucket.

    Raises:
        Failed: SETTINGS_INVALID if flat batches do not give what the model itself gives.
        Unavailable: DEVICE_ERROR if there is no memory for the blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kv_blocks: int = KV_BLOCKS,
        runner: Runner | None = None,
        most_rows: int = ROW_BUCKETS[-1],
    ) -> None:
        from transformers import AttentionInterface

        bare: Any = model  # torch's type of an attribute is Tensor | Module
        self._model = bare
        config: Any = bare.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.positions = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self.device: torch.device = next(model.parameters()).device
        self.runner: Runner = Launched() if runner is None else runner
        self._most_rows = most_rows
        with torch.inference_mode():
            own = [model(input_ids=self._ids(tokens)[None]).logits[0, -1] for tokens in _PROBE]
        self._before = bare.config._attn_implementation
        AttentionInterface.register(NAME, attend)
        bare.set_attn_implementation(NAME)
        try:
            self._pool = KeyValuePool(self._form(), kv_blocks)
            self._inputs = StaticInputs(self._pool, self.device)
            self._logits = torch.zeros(0, self.vocabulary, device=self.device)
            self._verdicts = torch.zeros(0, dtype=torch.int64, device=self.device)
            self._judged = torch.zeros(2, 0, dtype=torch.int64, device=self.device)
            self._pages = deque(Page(ROW_BUCKETS[-1]) for _ in range(PAGES if self.device.type == "cuda" else 0))
            self._check(torch.stack(own))
        except BaseException:
            self.close()
            raise

    def key_values(self) -> KeyValues:
        """For a new sequence."""
        return KeyValues(self._pool)

    def plan(self, sequences: Sequence[Rows]) -> StepRows:
        """What a step of these will run. Each must have blocks for its rows (`KeyValues.reserve`)."""
        return StepRows.of(sequences, self._most_rows)

    def run(self, step: StepRows, launches: Hashable | None = None) -> Tensor:
        """One forward over all rows, in order, and its padding. If it raises, every sequence has what it had.

        An id of ~n, which is below 0, stands for what sequence n of the step before has said (`hear`): the host need
        not know it yet.

        Args:
            launches: what, beside the step's size, kernels and grids of the forward depend on, such as the shape
                of an engine's step; None: they may depend on anything, so that no graph can stand for them.

        Returns:
            Logits [sequences, vocabulary] in float32, behind each sequence's last row; until the next call.
        """
        with torch.inference_mode():
            logits = self._each_apart(step) if step.bucket is None else self._by_table(step, step.bucket, launches)
        for tokens, kv in step.sequences:
            kv.commit(len(tokens))
        return logits

    def verdict(self) -> Verdict:
        """What the last `run` says of each sequence, and behind them perhaps of none. To be waited for before the
        second run after it has its own."""
        if not self._pages or self._judged.shape[1] > ROW_BUCKETS[-1]:
            return Verdict(self._judged)
        self._pages.rotate()
        return Verdict(self._judged, self._pages[0])

    def hear(self, tokens: Tensor) -> None:
        """What the sequences of the last step have said, `MOST_SAID` at most: int64, on the device."""
        with torch.inference_mode():
            self._inputs.said[: len(tokens)].copy_(tokens)

    def close(self) -> None:
        """The model attends as it did before. Idempotent."""
        self.runner.forget()
        self._model.set_attn_implementation(self._before)

    def _each_apart(self, step: StepRows) -> Tensor:
        batch = made_for(step, self._pool, self._inputs.said, self._most_rows)
        self._pool.clear()
        logits = self._forward(batch).float()
        self._judged = judge(logits)
        return logits

    def _by_table(self, step: StepRows, bucket: Bucket, launches: Hashable | None) -> Tensor:
        lasts = lasts_of(bucket, len(step.sequences))
        logits, judged = self._room(lasts)
        self._pool.clear(self._inputs.send(step, bucket))

        def work() -> None:
            """All of it in one graph: what is launched beside it takes the host longer than the device."""
            said = self._forward(self._inputs.batch(bucket, lasts))
            logits.copy_(said)
            judged.copy_(judge(said))

        self.runner.run(None if launches is None else (bucket, lasts, launches), work)
        self._judged = judged
        return logits[: len(step.sequences)]

    def _room(self, lasts: int) -> tuple[Tensor, Tensor]:
        """Where the logits of so many sequences go, and what is said of them. Graphs know the addresses: all of it is
        there from the first step on."""
        if len(self._logits) < lasts:
            self.runner.forget()
            largest = self._largest(lasts)
            self._logits = torch.zeros(largest, self.vocabulary, device=self.device)
            self._verdicts = torch.zeros(2 * largest, dtype=torch.int64, device=self.device)
        return self._logits[:lasts], self._verdicts[: 2 * lasts].view(2, lasts)

    def _largest(self, rows: int) -> int:
        return max(rows, next((b for b in ROW_BUCKETS if b >= self._most_rows), ROW_BUCKETS[-1]))

    def _forward(self, batch: FlatBatch) -> Tensor:
        return self._call(batch, batch.ids, batch.positions, batch.last)

    def _call(self, batch: Attended, ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last, **{KEYWORD: batch}
        )
        logits: Tensor = output.logits[0]
        return logits

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self.device)

    def _form(self) -> dict[int, tuple[Tensor, Tensor]]:
        """What a token's keys and values look like, by layer."""
        look = OneSequence()
        with torch.inference_mode():
            self._call(look, self._ids(_FORM), self._ids(range(len(_FORM))), self._ids([0]))
        return look.seen

    def _check(self, own_NV: Tensor) -> None:
        """The probe's sequences in two flat forwards, the first one cut in the middle, by table and without."""
        most = float(own_NV.abs().max())
        allowed = max(PROBE_TOLERANCE, PROBE_ROUNDINGS * torch.finfo(own_NV.dtype).eps) * max(1.0, most)
        for most_rows in (self._most_rows, 0):
            difference = float((self._probe(most_rows) - own_NV.float()).abs().max())
            if not difference <= allowed:
                raise error(
                    Code.SETTINGS_INVALID, "model",
                    f"flat batches give other logits than the model itself: {difference:g}",
                    "Serve a model with plain causal attention, such as a Llama.",
                )  # fmt: skip

    def _probe(self, most_rows: int) -> Tensor:
        (first, second), cut = _PROBE, 2
        with self._two() as (one, other):
            one.reserve(len(first))
            other.reserve(len(second))
            self.run(StepRows.of([(first[:cut], one)], most_rows))
            return self.run(StepRows.of([(first[cut:], one), (second, other)], most_rows)).clone()

    @contextmanager
    def _two(self) -> Iterator[tuple[KeyValues, KeyValues]]:
        kvs = self.key_values(), self.key_values()
        try:
            yield kvs
        finally:
            for kv in kvs:
                kv.free()
