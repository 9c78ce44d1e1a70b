"""Decides which queued call is placed next, on which engine, and whether it should be delayed.

Owns the queue, the predicted load of each engine, the predicted costs of calls and the order of
applications. It must not know how a call is run, talk to an engine, or touch a context."""
