"""Contexts: the prefixes on each engine, their predicted next use, and the order of eviction.

The package owns all records of contexts, the prefix index, and the forecasts of future uses. It
does not know runs or placements. It never calls an engine: it passes the ids of contexts to free to
the callback `on_free`."""
