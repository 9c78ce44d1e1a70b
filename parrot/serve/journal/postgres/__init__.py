"""A journal in a PostgreSQL database, which several ServeCores may share: one has its lease.

Needs the extra `postgres`. Owns the tables and the connections to their server. It must not know
what the holder of the lease does with it."""
