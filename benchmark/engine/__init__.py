"""Measurements of the builtin engine: on a CPU, on a GPU, and of its control half alone."""
