"""Grouped LoRA over one base model: see `LoRAEngine`."""

from .engine import LoRAEngine, Step
from .receipt import Applied, Receipt, SegmentReceipt

__all__ = ["Applied", "LoRAEngine", "Receipt", "SegmentReceipt", "Step"]
