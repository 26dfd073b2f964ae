"""Many sequences as the rows of one forward.

The rows of all sequences stand one after the other in a batch of one, [1, rows, hidden]. Linears do not mix rows,
so they see one flat batch without padding, prefill and decode together, and one engine step says which rows get
what. Only attention has to know whose rows are whose: an attention function of ours, registered with transformers,
gives each sequence its own keys and values. What a sequence attends to therefore never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from adapterd.cli.worker.kv import KeyValues
from adapterd.loader.errors import Code, error

NAME = "adapterd_flat"
KEYWORD = "adapterd_flat_batch"
"""The keyword argument that transformers hands through to the attention function."""
UNSUPPORTED = ("s_aux", "softcap", "position_bias")


@dataclass(slots=True)
class Part:
    """One sequence's rows of a forward: [start, stop) of the flat batch, behind `kv.length` earlier tokens."""

    start: int
    stop: int
    kv: KeyValues
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Which keys each row sees, [rows, keys]: those up to its own, `window` of them at most. None: all."""
        rows, keys = self.stop - self.start, self.kv.length + self.stop - self.start
        if rows == 1 and (window is None or keys <= window):
            return None
        if window not in self._masks:
            row, key = torch.arange(rows, device=device)[:, None] + self.kv.length, torch.arange(keys, device=device)
            seen = key <= row
            self._masks[window] = seen if window is None else seen & (key > row - window)
        return self._masks[window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function, in transformers' form.

    Args:
        module: the attention layer; its `layer_idx` names the layer.
        query: [1, heads, rows, size].
        key, value: [1, kv heads, rows, size], of the new rows only.
        attention_mask: not used; there is one sequence a part.

    Returns:
        [1, rows, heads, size], and no weights.

    Raises:
        Failed: SETTINGS_INVALID if the model's attention has something that is not done here.
    """
    parts: Sequence[Part] | None = others.get(KEYWORD)
    missing = [name for name in UNSUPPORTED if others.get(name) is not None]
    if parts is None or missing or query.shape[0] != 1:
        what = f"the attention needs {', '.join(missing)}" if missing else "its layers do not hand arguments on"
        raise error(
            Code.SETTINGS_INVALID, type(module).__name__, f"this model cannot be served in flat batches: {what}",
            "Serve a model with plain causal attention, such as a Llama.",
        )  # fmt: skip
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = torch.empty_like(query.transpose(1, 2))
    for part in parts:
        rows = slice(part.start, part.stop)
        keys, values = part.kv.extend(layer, key[0, :, rows], value[0, :, rows])
        attended = scaled_dot_product_attention(
            query[:, :, rows], keys[None], values[None],
            attn_mask=part.mask(sliding_window, query.device),
            scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        out[:, rows] = attended.transpose(1, 2)
    return out, None
