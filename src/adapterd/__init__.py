"""adapterd: a registry for LoRA adapters, and the secure way to get them onto a GPU."""

from importlib.metadata import version

__version__ = version("adapterd")
