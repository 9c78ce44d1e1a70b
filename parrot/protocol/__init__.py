"""The package that clients, ServeCore and engines share: all that crosses a process boundary.

It contains the payloads of both APIs, the errors with their HTTP statuses, the transports, the
clients of both APIs, and the common parts of servers. It does not process requests, and connections
are its only state."""
