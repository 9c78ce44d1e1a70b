"""Servers on machines that the system's ssh reaches: `parrot launch INVENTORY`.

`Machines`, here, has a connection to each machine (`ssh.Link`), and at its other end an `agent`,
whose `Supervisor` owns the servers' processes there."""
