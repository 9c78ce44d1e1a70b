"""Collectives between the ranks of a model, through memory that all ranks can access."""
