"""Measurements of ServeCore: alone, and over simulated engines on virtual time."""
