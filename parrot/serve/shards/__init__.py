"""Several ServeCores that share sessions out among them, each with a journal of its own.

Owns which of them has a session, by its id, and the way of a request to it. It must not know what a
request asks for."""
