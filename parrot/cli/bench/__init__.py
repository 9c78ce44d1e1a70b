"""`parrot bench`: requests and applications, measured on a ServeCore and on any server of OpenAI's
API.

A workload is written once, against `program.py`. A program of it then runs as one that submits its
graph of semantic variables, or as one that waits for each output and sends whole prompts."""
