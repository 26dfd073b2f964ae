"""From logits to one token id a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from adapterd.cli.worker.requests import Request


class Verdict:
    """What a forward says of each sequence: whether all its logits are finite, and the largest one's number.

    It is made on the device, and on its way to the host until somebody waits for it.

    Attributes:
        tokens: int64 [sequences] on the device.

    Args:
        logits_NV: [sequences, vocabulary]; read in the current stream.
    """

    def __init__(self, logits_NV: Tensor) -> None:
        largest_N, self.tokens = logits_NV.max(dim=-1)  # a NaN is the largest, and the least, of all
        sound_N = largest_N.isfinite() & logits_NV.amin(dim=-1).isfinite()
        found_N2 = torch.stack([sound_N.long(), self.tokens], dim=-1)
        self._here: torch.cuda.Event | None = None
        if not found_N2.is_cuda:
            self._found = found_N2
            return
        self._found = torch.empty_like(found_N2, device="cpu", pin_memory=True)
        self._found.copy_(found_N2, non_blocking=True)
        self._here = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._here.record()

    def wait(self) -> list[tuple[int, int]]:
        """(1 if it is sound, the token) of each sequence. Raises RuntimeError: the device could not do it."""
        if self._here is not None:
            self._here.synchronize()
        found: list[tuple[int, int]] = self._found.tolist()
        return found


class Sampler:
    """One request's choice of tokens: greedy, or drawn with a generator of its own.

    Attributes:
        greedy: whether it takes the largest, which the device knows itself.

    The generator is on the CPU and advances by one draw a token, so that neither the device nor who else is in
    the batch changes what is drawn.
    """

    def __init__(self, request: Request) -> None:
        self._temperature = request.temperature
        self.greedy = request.temperature == 0
        self._random = torch.Generator().manual_seed(request.seed) if request.temperature > 0 else None

    def __call__(self, logits_NV: Tensor, row: int, greedy: int) -> int:
        """The next token, by one row of the logits. `greedy` is the index of the largest of it."""
        if self._random is None:
            return greedy
        logits_V = logits_NV[row]
        sharpened_V = (logits_V - logits_V.max()).double().cpu() / self._temperature  # no overflow, however cold
        probabilities = torch.softmax(sharpened_V, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._random))
