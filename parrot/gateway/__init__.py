"""Other people's APIs on the graph: what vendors' clients, browsers, auditors and other shards ask,
as verbs of ServeCore.

The package stands on `parrot.serve`, which knows nothing of it: what makes the app puts both
together."""
