"""The journal: the records from which a restarted ServeCore restores its sessions.

The package owns the records, the thread that writes them, their storage, and the replay. ServeCore
uses the journal through the protocol `CommandLog`. Without a journal, none of this code runs."""
