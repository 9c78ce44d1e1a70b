"""Traces, in the forms of the W3C and of OpenTelemetry."""
