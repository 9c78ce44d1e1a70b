"""Servers on a Ray cluster: `parrot launch --ray`.

Ray places actors, keeps their resources and starts them again elsewhere when their node dies. An
actor owns one server's process (`actor`) and nothing else of Parrot runs in Ray's workers. The
`Supervisor` says which servers there are to be, and `RayRuntime` is all that knows Ray."""
