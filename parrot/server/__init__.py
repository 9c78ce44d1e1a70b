"""ServeCore as a process: the only package that imports `serve`, `gateway`, `journal` and `observe`
together.

`app.py` builds the HTTP app, `serving.py` a running ServeCore with its journal and observers, and
`standby.py` takes turns with other processes. No request is handled in this package."""
