"""Streams of an engine that stand beside the requests for which outputs are made: the pieces of
one output, for who comes later, and the channel, on which those of all outputs come.

The room owns what is said on them, and the client's side of a channel. It knows nothing of what
the pieces are for."""
