"""The host tier: KV that is evicted from GPU memory is kept in CPU memory and can be loaded again.

This package decides which blocks are copied, and when. It owns the slots in CPU memory, the
transfers, and the blocks that wait for a load. It must not know how steps are computed.
"""
