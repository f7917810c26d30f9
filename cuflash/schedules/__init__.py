"""The host side of each schedule: its constants, shared memory, grid and tiles; one module per family of kernels.

A configuration is a frozen dataclass whose fields become `struct Config` in CUDA.  It offers ``threads``,
``shared_bytes(itemsize)`` (compared with the kernel's own figure in a test) and ``blocks(problem)`` (all on grid.x).
"""
