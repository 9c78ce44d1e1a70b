"""The forced outputs of the benchmark of drafts, and a simulated device that generates them."""
