"""The APIs of OpenAI, Anthropic and vLLM, served as calls of Parrot's graphs.

This package owns each vendor's wire format: fields, events and errors. It does not know how a turn
is scheduled or run. It submits a `TurnRequest` to `Turns` and formats the answer."""
