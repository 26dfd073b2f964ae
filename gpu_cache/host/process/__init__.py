"""The loader as a process of its own: one a machine, shared by all workers, over a Unix socket and a shared slab."""
