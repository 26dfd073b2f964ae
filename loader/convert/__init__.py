"""Rewriting an adapter's tensor names into PEFT's own, where that can be proved; for authors, never for the server.

`names` decides what each tensor is called, `rewriting` writes the copy. No byte of a tensor changes.
"""

from adapterd.loader.convert.names import Rename, Step
from adapterd.loader.convert.rewriting import Conversion, plan_conversion, write_weights

__all__ = ["Conversion", "Rename", "Step", "plan_conversion", "write_weights"]
