"""The model as the loop sees it: rows of many sequences in, the logits behind each sequence's last row out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adapterd.cli.worker.attention import KEYWORD, NAME, Part, attend
from adapterd.cli.worker.kv import KeyValues
from adapterd.loader.errors import Code, error

PROBE_TOLERANCE = 1e-3
"""Of the largest logit, between one flat forward and the model's own; float32's noise is far below it."""
_PROBE = ((3, 1, 2), (1,))

Rows = tuple[Sequence[int], KeyValues]
"""The next token ids of one sequence, and what it has."""


class FlatModel:
    """A transformers causal LM whose attention takes flat batches (see `attention`). `close` undoes that.

    Attributes:
        vocabulary: token ids are below it.
        positions: tokens of one sequence at most.

    Args:
        model: in evaluation mode, on its device.

    Raises:
        Failed: SETTINGS_INVALID if flat batches do not give what the model itself gives.
    """

    def __init__(self, model: nn.Module) -> None:
        from transformers import AttentionInterface

        bare: Any = model  # torch's type of an attribute is Tensor | Module
        self._model = bare
        config: Any = bare.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.positions = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self.device: torch.device = next(model.parameters()).device
        with torch.inference_mode():
            own = [model(input_ids=self._ids(tokens)[None]).logits[0, -1] for tokens in _PROBE]
        self._before = bare.config._attn_implementation
        AttentionInterface.register(NAME, attend)
        bare.set_attn_implementation(NAME)
        try:
            self._check(torch.stack(own))
        except BaseException:
            self.close()
            raise

    def __call__(self, rows: Sequence[Rows]) -> Tensor:
        """One forward over all rows, in order. If it raises, every sequence has what it had.

        Returns:
            Logits [sequences, vocabulary] in float32, behind each sequence's last row.
        """
        parts: list[Part] = []
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for tokens, kv in rows:
            parts.append(Part(len(ids), len(ids) + len(tokens), kv))
            ids += tokens
            positions += range(kv.length, kv.length + len(tokens))
            last.append(len(ids) - 1)
        with torch.inference_mode():
            output = self._model(
                input_ids=self._ids(ids)[None], position_ids=self._ids(positions)[None], use_cache=False,
                logits_to_keep=self._ids(last), **{KEYWORD: parts},
            )  # fmt: skip
        for tokens, kv in rows:
            kv.commit(len(tokens))
        logits: Tensor = output.logits[0].float()
        return logits

    def close(self) -> None:
        """The model attends as it did before. Idempotent."""
        self._model.set_attn_implementation(self._before)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self.device)

    def _check(self, own_NV: Tensor) -> None:
        """The probe's sequences in two flat forwards, the first one cut in the middle."""
        kvs = [KeyValues() for _ in _PROBE]
        (first, second), cut = _PROBE, 2
        self([(first[:cut], kvs[0])])
        flat = self([(first[cut:], kvs[0]), (second, kvs[1])])
        difference = float((flat - own_NV.float()).abs().max())
        if not difference <= PROBE_TOLERANCE * max(1.0, float(own_NV.abs().max())):
            raise error(
                Code.SETTINGS_INVALID, "model", f"flat batches give other logits than the model itself: {difference:g}",
                "Serve a model with plain causal attention, such as a Llama.",
            )  # fmt: skip
