"""Measurements of the CUDA kernels, each against the floor that the device sets."""

MEMORY_RATE = 4.3e12
"""Bytes a second that a large copy moves on an H200, both ways together."""

MATRIX_RATE = 790e12
"""Operations a second of an H200's matrix products in bfloat16."""
