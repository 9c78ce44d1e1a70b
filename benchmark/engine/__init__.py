"""Benchmarks of the builtin engine: on a CPU, on a GPU, and of the engine core without a model."""
