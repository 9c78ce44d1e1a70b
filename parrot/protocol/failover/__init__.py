"""The way to a service with several addresses, of which one serves at a time.

Owns which of them is asked. It must not know what is asked for, but if it may be asked twice."""
