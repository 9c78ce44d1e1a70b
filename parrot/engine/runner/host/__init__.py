"""The memory of the host tier, and the copies between it and the KV pool.

This room does the transfers that the core has decided on. It owns the host's slots and the streams
of the copies. It must not know what is copied, or why.
"""
