"""Sessions as traces: what ServeCore tells of them, and the spans that are made of it."""
