"""Servers on several machines: which there are (`configs`, `plan`), apart from where they run.

A launcher reads a launch file, plans the servers, finds a place for each, and starts there what the
plan says: a module, which gets its config through a pipe, since that holds the secrets."""
