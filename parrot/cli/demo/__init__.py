"""`parrot demo`: a real application on a real model, from start to finish, on this machine.

`command` starts the servers, at once, and shows what happens; `program` is the application."""
