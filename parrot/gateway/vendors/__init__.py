"""The APIs that applications already speak, as calls of Parrot's own graph.

The room owns each vendor's wire format: its fields, its events, its errors. It must not know how a
turn is scheduled or run: it asks `Turns`, and writes down what comes of it."""
