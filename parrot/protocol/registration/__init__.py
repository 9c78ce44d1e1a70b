"""What an engine asks of ServeCore: to join, to stay, to leave.

Owns the payloads of these three requests. It must not know when they are made."""
