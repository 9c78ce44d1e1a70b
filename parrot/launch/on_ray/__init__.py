"""Servers on a Ray cluster: `parrot launch --ray`.

Ray places actors, reserves their resources, and restarts them on another node when their node
dies. Each actor owns the process of one server (`actor`). No other code of Parrot runs in Ray's
workers. The `Supervisor` decides which servers run, and `RayRuntime` starts them with Ray."""
