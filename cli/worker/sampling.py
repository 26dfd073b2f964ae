"""From logits to one token id a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from adapterd.cli.worker.requests import Request


def judge(logits_NV: Tensor) -> Tensor:
    """Of each sequence: whether all its logits are finite, and the largest one's number. int64 [2, sequences].

    It asks nothing of the host: it may be part of a captured graph.

    Args:
        logits_NV: [sequences, vocabulary].
    """
    largest_N, tokens_N = logits_NV.max(dim=-1)  # a NaN is the largest, and the least, of all
    sound_N = largest_N.isfinite() & logits_NV.amin(dim=-1).isfinite()
    return torch.stack([sound_N.long(), tokens_N])


class Page:
    """Host memory for verdicts, pinned, with the mark behind the last copy into it.

    Args:
        most: sequences.
    """

    def __init__(self, most: int) -> None:
        self.here = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._memory = torch.empty(2 * most, dtype=torch.int64, pin_memory=True)
        self._parts: dict[int, Tensor] = {}

    def of(self, sequences: int) -> Tensor:
        """int64 [2, sequences]."""
        if sequences not in self._parts:
            self._parts[sequences] = self._memory[: 2 * sequences].view(2, sequences)
        return self._parts[sequences]


class Verdict:
    """What a forward says of each sequence, on its way to the host until somebody waits for it.

    Attributes:
        tokens: int64 [sequences] on the device.

    Args:
        found_2N: as `judge` makes it; read in the current stream.
        page: where it goes, if that is not one of its own; nobody else's before it was waited for.
    """

    def __init__(self, found_2N: Tensor, page: Page | None = None) -> None:
        self.tokens = found_2N[1]
        self._here: torch.cuda.Event | None = None
        if not found_2N.is_cuda:
            self._found = found_2N.clone()
            return
        page = page or Page(found_2N.shape[1])
        self._found, self._here = page.of(found_2N.shape[1]), page.here
        self._found.copy_(found_2N, non_blocking=True)
        self._here.record()

    def wait(self) -> list[tuple[int, int]]:
        """(1 if it is sound, the token) of each sequence. Raises RuntimeError: the device could not do it."""
        if self._here is not None:
            self._here.synchronize()
        sound, tokens = self._found.tolist()
        return list(zip(sound, tokens, strict=True))


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
