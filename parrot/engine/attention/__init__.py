"""Attention of a step over the KV of its contexts.

This room plans which keys are read once for which queries, and runs such a plan in plain torch or
with the Triton kernels. It owns the work list of a step and the buffers of partial results. It must
not know of models, of jobs, or of who uses a block and for how long.
"""
