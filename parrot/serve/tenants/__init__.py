"""Tenants: who a caller is, what it may do, and what it may keep.

The room owns the table of keys. It must not know sessions, graphs or engines: those ask it."""
