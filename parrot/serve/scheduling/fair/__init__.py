"""Fair share between tenants: whose turn it is, and what each may take of an engine.

The room owns the tenants' counters and what they have on engines. It knows nothing of the order
inside a tenant: that is the order policy's."""
