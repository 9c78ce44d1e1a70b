"""The memory of the host tier, and the copies between it and the KV pool.

This package runs the transfers that the core has decided on. It owns the slots in CPU memory and
the CUDA streams of the copies. It does not know the content of the blocks or the reason for a copy.
"""
