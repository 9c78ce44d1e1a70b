"""Several ServeCores that share sessions out among them, each with its own engines and journal.

Owns which of them has a session, by its id, and the way of a request to it. It must not know what a
request asks for."""
