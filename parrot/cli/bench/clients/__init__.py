"""Clients in the styles of programs that are compared."""
