"""Many sequences as the rows of one forward.

The rows of all sequences stand one after the other in a batch of one, [1, rows, hidden]. Linears do not mix rows,
so they see one flat batch without padding between sequences, prefill and decode together, and one engine step says
which rows get what. Only attention has to know whose rows are whose: an attention function of ours, registered with
transformers, asks the batch (`batch`). What a sequence attends to never depends on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from adapterd.loader.errors import Code, error

NAME = "adapterd_flat"
KEYWORD = "adapterd_flat_batch"
"""The keyword argument that transformers hands through to the attention function."""
UNSUPPORTED = ("s_aux", "softcap", "position_bias")


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's input of attention.

    Attributes:
        layer: its number.
        query: [1, heads, rows, size].
        key, value: [1, kv heads, rows, size], of the new rows only.
        scale: of the products; None is one over the root of the size.
        window: keys that a row sees at most; None: all.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    window: int | None


class Attended(Protocol):
    """A step's rows, as attention sees them."""

    def attend(self, heads: Heads) -> Tensor:
        """[1, rows, heads, size]."""
        ...


@dataclass(slots=True)
class OneSequence:
    """A first look at a model: one sequence and nothing kept.

    Attributes:
        seen: by layer, one token's keys and values, each [kv heads, size].
    """

    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, heads: Heads) -> Tensor:
        """See `Attended`. Windows do not count: what is looked at is the layers' form."""
        self.seen[heads.layer] = heads.key[0, :, 0], heads.value[0, :, 0]
        out: Tensor = scaled_dot_product_attention(
            heads.query, heads.key, heads.value, is_causal=True, scale=heads.scale,
            enable_gqa=heads.query.shape[1] != heads.key.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2)


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
        attention_mask: not used; the batch knows who sees what.

    Returns:
        [1, rows, heads, size], and no weights.

    Raises:
        Failed: SETTINGS_INVALID if the model's attention has something that is not done here.
    """
    batch: Attended | None = others.get(KEYWORD)
    missing = [name for name in UNSUPPORTED if others.get(name) is not None]
    if batch is None or missing or query.shape[0] != 1:
        what = f"the attention needs {', '.join(missing)}" if missing else "its layers do not hand arguments on"
        raise error(
            Code.SETTINGS_INVALID, type(module).__name__, f"this model cannot be served in flat batches: {what}",
            "Serve a model with plain causal attention, such as a Llama.",
        )  # fmt: skip
    layer = module.layer_idx
    assert isinstance(layer, int)
    return batch.attend(Heads(layer, query, key, value, scaling, sliding_window)), None
