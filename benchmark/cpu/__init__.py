"""Benchmarks on a CPU that is shared with other programs."""
