"""Other people's APIs on the graph: what vendors' clients, browsers, auditors and other shards ask,
as verbs of ServeCore.

The package uses `parrot.serve`, which does not know it. `parrot/server` puts both together."""
