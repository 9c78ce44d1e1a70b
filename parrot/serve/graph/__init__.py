"""The graph of a session: its variables, the calls that produce and consume them, and their demand.

This package owns the state of each variable, the demand for each task and the task's objective. It
starts and withdraws tasks through an `Executor`, which reports results by settling variables. It
must not know engines, contexts, the scheduler or HTTP."""
