"""APIs on top of ServeCore: vendors' APIs, the web page, the audit log, and forwarding between
shards.

The package uses `parrot.serve`, which does not import it. `parrot/server` connects the two."""
