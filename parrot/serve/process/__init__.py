"""ServeCore as a process: its parts put together, and whose turn it is if several share a journal.

Owns what lives as long as a turn. It must not know what requests do."""
