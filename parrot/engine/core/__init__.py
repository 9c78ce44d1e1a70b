"""The engine core: requests in, steps, outcomes out.

This room decides which contexts get how many tokens in each step, whose KV stays in memory, and
which text a request is answered with. It owns the engine's requests, contexts, blocks and queues.
It must not know how a step is computed (no torch), nor of HTTP, sessions or graphs.
"""
