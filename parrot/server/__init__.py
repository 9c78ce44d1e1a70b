"""ServeCore as a process. Only this package imports `serve`, `gateway`, `journal` and `observe`.

`app.py` builds the HTTP app, `serving.py` a running ServeCore with its journal and observers, and
`standby.py` takes turns with other processes. No request is handled in this package."""
