"""The requests that engines make of ServeCore: to join, to stay, to leave.

Owns their payloads. It must not know when they are made."""
