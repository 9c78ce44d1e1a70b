"""Servers with an OpenAI API that ServeCore calls itself, without an engine process.

The config key `servers` turns this package on. Each model that a server lists becomes an engine of
type `openai` that runs in ServeCore's process. It registers and sends heartbeats like every other
engine, so the scheduler treats it like every other engine.
"""
