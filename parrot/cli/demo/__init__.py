"""`parrot demo`: runs a complete application with a real model on this machine.

`command` starts the servers and shows the run. `program` is the application."""
