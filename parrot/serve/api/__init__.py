"""ServeCore's HTTP routes: each reads its fields, calls one verb of `ServeCore`, writes the answer.

The room owns paths, statuses and the OpenAPI page. It must not know how a verb does its work, and
nothing behind it knows HTTP."""
