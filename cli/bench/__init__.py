"""`adapterctl bench`: the engine's kernels on the card that is here."""
