"""The host tier: KV that leaves the device goes to the host's memory, and comes back by copy.

This room says which blocks are copied, and when. It owns the slots of the host, what is on its way
between the tiers, and the blocks that wait for KV on its way. It must not know who computes.
"""
