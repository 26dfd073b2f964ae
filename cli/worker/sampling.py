"""From logits to one token id a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from adapterd.cli.worker.requests import Request


class Sampler:
    """One request's choice of tokens: greedy, or drawn with a generator of its own.

    The generator is on the CPU and advances by one draw a token, so that neither the device nor who else is in
    the batch changes what is drawn.
    """

    def __init__(self, request: Request) -> None:
        self._temperature = request.temperature
        self._random = torch.Generator().manual_seed(request.seed) if request.temperature > 0 else None

    def __call__(self, logits_NV: Tensor, row: int, greedy: int) -> int:
        """The next token, by one row of the logits. `greedy` is the index of the largest of it."""
        if self._random is None:
            return greedy
        logits_V = logits_NV[row]
        sharpened_V = (logits_V - logits_V.max()).double().cpu() / self._temperature  # no overflow, however cold
        probabilities = torch.softmax(sharpened_V, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._random))
