"""Fair share: what a crowd of one tenant's jobs leaves to another tenant's few.

The room owns each tenant's part of the next step, and each share group's part of the memory. It
knows what steps cost and whose blocks there are, and nothing of queues and of what blocks hold."""
