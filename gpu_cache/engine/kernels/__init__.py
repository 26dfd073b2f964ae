"""Grouped LoRA kernels in Triton over block tables. Import only where Triton is: see `dispatch`."""
