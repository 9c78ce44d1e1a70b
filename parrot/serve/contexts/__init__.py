"""Contexts: which engine holds which prefix, when it will be used next, and what is evicted first.

The package owns all records of contexts, the prefix index, and the forecasts of future uses. It
does not know runs or placements. It never calls an engine: it passes the ids of contexts to free to
the callback `on_free`."""
