"""Triton kernels, and the functions that check shapes and launch them.

This package computes attention items, products of few rows, norms, rotations and sampling on a GPU.
It owns the tiles and launch parameters of each kernel, and the layouts of the arrays that kernels
read. It does not know steps, plans or models: its functions receive tensors.
"""
