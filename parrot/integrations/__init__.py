"""Integrations with other frameworks. Each has its own optional dependency (pip extra)."""
