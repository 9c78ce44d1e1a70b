"""Attention of a step over the KV of its contexts.

This package plans which keys are read once for which queries, and runs the plan in plain torch or
with the Triton kernels. It owns the work list of a step and the buffers of partial results. It does
not know models, jobs, or the owners of blocks.
"""
