"""The documented name of the command `python3 -m parrot.server.http_server`."""

from parrot.server.http_server import main

if __name__ == "__main__":
    main()
