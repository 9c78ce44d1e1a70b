"""The engine core: requests in, steps, outcomes out.

This package decides how many tokens of each context a step computes, which KV stays in memory, and
which text answers a request. It owns the engine's requests, contexts, blocks and queues. It must
not know how a step is computed (no torch), and nothing about HTTP, sessions or graphs.
"""
