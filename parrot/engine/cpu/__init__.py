"""The wing of compiled kernels for a CPU: `runner.load` is the only module that knows of it.

It computes what lies between a decoder's products of matrices (norms, turned heads, attention over
pages and of prompts, gates), and owns how kernels are compiled, kept and loaded. The kernels know
of no steps, plans or models: they are given addresses.
"""
