"""Compiled kernels for a CPU. Only `runner.load` imports this package.

It computes the operations between a decoder's matrix products (norms, rotation of heads, attention
over pages and of prompts, gates). It owns how kernels are compiled, cached and loaded. The kernels
do not know steps, plans or models: they receive addresses.
"""
