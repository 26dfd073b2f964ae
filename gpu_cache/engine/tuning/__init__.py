"""Times the kernels on a card, and searches launch configurations for it. Only `workloads` is free of torch."""
