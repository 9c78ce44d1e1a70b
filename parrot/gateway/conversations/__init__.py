"""Conversations: programs that send their history again with every turn, instead of a session.

The room owns which session such a program has and which of its turns a prompt continues, so that a
turn is a node of a graph like any call. It must not know any vendor's wire format."""
