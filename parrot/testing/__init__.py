"""Processes that return what they computed, for tests of programs written for the original Parrot.
Nothing that serves imports it; this project's own fakes are in tests/support."""
