"""Values for an adapter's trainable parameters."""

from __future__ import annotations

import re

import corpus.good.quiet  # noqa: F401, I001 - before all that it keeps quiet
import torch


def fill_adapter(model, seed, a_std=0.2, b_std=0.2, zero_b=None):
    """Give every trainable parameter seeded values; lora_B is zero only where the regex zero_b says so."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in sorted(model.named_parameters()):
            if not p.requires_grad:
                continue
            if "lora_magnitude_vector" in n:       # DoRA: near the initial norm
                p.mul_(1 + 0.1 * torch.randn(p.shape, generator=gen))
            elif "lora_" in n or "vera_" in n or "hada_" in n or "ia3_" in n:
                std = b_std if ("lora_B" in n or "embedding_B" in n) else a_std
                p.copy_(torch.randn(p.shape, generator=gen) * std)
                if zero_b and "lora_B" in n and re.search(zero_b, n):
                    p.zero_()
            else:                                   # modules_to_save, biases, token deltas
                p.add_(torch.randn(p.shape, generator=gen).to(p.dtype) * 0.1)


def fill_cancelling(model, seed):
    """Rows of A in equal pairs, columns of B in nearly opposite ones: B@A is 2^-14 * C@A', exactly.

    The factors are large and the product is small, yet far from nothing.  All entries of B are
    multiples of 2^-14 below 8, so that float32 holds them without rounding.
    """
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in sorted(model.named_parameters()):
            if "lora_A" in n:
                p.copy_(torch.repeat_interleave(torch.randn(p.shape[0] // 2, p.shape[1], generator=gen) * 0.2, 2, dim=0))
            elif "lora_B" in n:
                big = (torch.randn(p.shape[0], p.shape[1] // 2, generator=gen) * 2048).round().clamp(-8000, 8000) / 1024
                small = torch.randint(-8, 9, big.shape, generator=gen) * 2.0**-14
                p.copy_(torch.stack([big, small - big], dim=2).reshape(p.shape))
