"""Benchmarks of the CUDA kernels, compared with the floors of the device."""

MEMORY_RATE = 4.3e12
"""Bytes per second of a large copy on an H200, reads and writes together."""
