"""Exchanges between the ranks of a divided model, through memory that all of them can reach."""
