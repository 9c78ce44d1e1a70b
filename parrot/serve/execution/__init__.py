"""Execution: run ready completions on engines, and settle their outputs.

The package owns the runs and their states, the requests to engines, cached results, prefetches, and
the set of live engines. It does not know sessions, readers or the graph's edges: completions come
with their inputs ready."""
