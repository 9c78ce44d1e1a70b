"""Measurements of the CUDA kernels, each against the floor that the device sets."""
