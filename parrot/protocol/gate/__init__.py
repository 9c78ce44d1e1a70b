"""The checks of a request before any verb sees it: who may ask, how large, how long.

The room owns the rules that ServeCore and engines share. It knows connections, headers and bodies,
and nothing of what a request is about."""
