"""Kernels for few rows on a CPU, compiled on the machine that they run on.

This room computes what lies between a decoder's products of matrices: norms, turned heads,
attention over pages, gates. It owns how they are compiled, kept and loaded. It must not know of
steps, plans or models: it is given addresses.
"""
