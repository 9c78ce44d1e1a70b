"""Planning of servers for several machines. `configs` decides which servers run. A launcher, such
as `on_ray`, decides where they run.

A launcher reads a launch file, plans the servers, chooses a machine for each, and starts the
server's module there. The config goes through a pipe because it contains secrets."""
