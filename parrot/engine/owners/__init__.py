"""Several ServeCores that share one engine: what belongs to which of them.

Owns whose requests and contexts are whose, and where the engine is registered. It must not know how
requests are computed."""
