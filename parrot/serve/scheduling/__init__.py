"""Decides which queued call goes next, on which engine, and when it had better wait. Owns the
queue, each engine's predicted load, what calls are predicted to cost, and the order of
applications. It must not know how a call is run, talk to an engine, or touch a context."""
