"""The graph of a session: its variables, the calls that make and take them, and who wants what.

The room owns the state of every variable, the demand for every task and the objective that follows
from it. It starts and withdraws tasks through an `Executor`. It must not know engines, contexts,
the scheduler or HTTP: results come back through the variables alone."""
