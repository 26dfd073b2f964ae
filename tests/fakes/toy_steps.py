"""One step of an engine over a toy model, and one that is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor, nn

from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.loader.errors import AdapterdError, Code


def run(engine: LoRAEngine, model: nn.Module, x: Tensor, rows: Sequence[tuple[object, int]]) -> Tensor:
    """The model's output in a step with these rows."""
    with engine.step(rows) as step:  # type: ignore[arg-type]
        y = model(x)
    assert step.receipt.layer_calls > 0
    return y


def refused(
    code: Code, engine: LoRAEngine, model: nn.Module, x: Tensor, rows: Sequence[tuple[object, int]]
) -> AdapterdError:
    with pytest.raises(AdapterdError) as caught:
        run(engine, model, x, rows)
    assert caught.value.code is code
    return caught.value
