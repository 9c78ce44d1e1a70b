"""Recorded sessions of coding agents, replayed."""
