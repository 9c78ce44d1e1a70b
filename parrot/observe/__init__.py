"""Observers of ServeCore's events: the trace recorder for `parrot simulate`, OpenTelemetry spans of
sessions, and the call log. Without them, no code of this package runs."""
