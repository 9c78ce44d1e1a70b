"""The nemesis: a service of real processes, to which everything happens that can, while programs
with known answers run, and a checker that reads afterwards what they were told.

    programs --client--> link --> ServeCore --> link --> engines    each killed, stopped, cut off,
        |                           ^------------ link ----'        out of disk, ...
        v
    history --> check --> what was promised and not kept

The room owns the processes, the links between them, and the history. It asks the service what any
program may ask; of the servers' own books it sees only the account that they give in the end. The
checker is pure, and lives here since the command and the tests both need it."""
