"""Runners execute a step plan and return the sampled tokens.

This package turns a plan into arrays, computes it on a CPU or a GPU, and samples a token for each
sequence that requests one. It owns the KV pool, the block table in GPU memory, the CUDA graphs and
the random numbers of sampling. It does not know why a sequence is in a step, or how its tokens are
used: the engine core does.
"""
