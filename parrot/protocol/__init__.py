"""The only room that all tiers share: what crosses the boundary of a process.

It owns the payloads of both APIs, the tree of errors with its statuses, the transports and the two
clients on them, and what servers have in common. It knows nothing of what any tier does with a
request, and holds no state but connections."""
