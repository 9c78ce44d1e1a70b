"""Tenants: identity, permissions and limits of callers.

This package owns the table of API keys. It does not know sessions, graphs or engines: they use it.
"""
