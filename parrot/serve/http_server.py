"""The command that serves ServeCore:

`python3 -m parrot.serve.http_server --config_path core.json`
"""

from parrot.serve.process import main

if __name__ == "__main__":
    main()
