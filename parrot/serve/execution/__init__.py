"""Execution: from ready completions to settled outputs, over engines that come and go.

The room owns the runs and their states, the exchanges with engines, results that are shared, what
is computed ahead, and the set of live engines. It must not know sessions, readers or the graph's
edges: completions come in with their inputs ready, and their outputs are settled."""
