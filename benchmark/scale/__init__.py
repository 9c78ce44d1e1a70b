"""Measurements of services of several servers."""
