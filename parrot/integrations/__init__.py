"""Frameworks of others on Parrot, each with an extra of its own."""
