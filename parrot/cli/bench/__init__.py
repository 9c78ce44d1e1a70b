"""`parrot bench`: measures requests and applications on a ServeCore and on any server of OpenAI's
API.

A workload is written once, with the calls of `program.py`. `variables.py` runs it as a Parrot
program, `openai_client.py` as a client that waits for each output."""
