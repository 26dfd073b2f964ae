"""Grouped LoRA over one base model: see `LoRAEngine`."""

from adapterd.gpu_cache.engine.device_plan import LaunchShape
from adapterd.gpu_cache.engine.engine import LoRAEngine
from adapterd.gpu_cache.engine.receipt import Applied, Receipt, SegmentReceipt
from adapterd.gpu_cache.engine.step_context import Step

__all__ = ["Applied", "LaunchShape", "LoRAEngine", "Receipt", "SegmentReceipt", "Step"]
