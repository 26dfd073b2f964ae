"""adapterd: a registry for LoRA adapters, and the secure way to get them onto a GPU."""


def __getattr__(name: str) -> str:
    """`__version__`, looked up when asked: reading the metadata takes longer than all else that is imported here."""
    if name == "__version__":
        from importlib.metadata import version

        return version("adapterd")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
