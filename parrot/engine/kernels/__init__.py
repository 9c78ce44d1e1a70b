"""Triton kernels, and the functions that check shapes and launch them.

This room computes attention items, products of few rows, norms, rotations and the choice of tokens
on a GPU. It owns the tiles and launch parameters of each kernel, and the layouts of the arrays that
kernels read. It must not know of steps, plans or models: it is given tensors.
"""
