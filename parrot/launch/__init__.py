"""Servers on several machines: which there are (`configs`, `plan`), apart from where they run.

A launcher reads a launch file, plans the servers, finds a place for each, and starts there what the
plan says: a command, and a config file that only its owner may read, since it holds the secrets."""
