"""Grouped LoRA over one base model: see `LoRAEngine`."""

from adapterd.gpu_cache.engine.engine import LoRAEngine, Step
from adapterd.gpu_cache.engine.receipt import Applied, Receipt, SegmentReceipt

__all__ = ["Applied", "LoRAEngine", "Receipt", "SegmentReceipt", "Step"]
