"""Soak tests: ServeCore must release all state of a hundred thousand programs."""
