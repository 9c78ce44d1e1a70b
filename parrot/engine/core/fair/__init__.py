"""Fair share inside a step: what a crowd of one tenant's jobs leaves to another tenant's few.

The room owns each tenant's part of the next step. It knows what steps cost, and nothing of queues
and blocks."""
