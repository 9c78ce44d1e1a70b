"""Observers of ServeCore: the recorder of traces for `parrot simulate`, the spans of sessions for
OpenTelemetry, and the log of calls. A process that has none of them passes nothing here."""
