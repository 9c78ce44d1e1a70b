"""The front ends, which programs import to call a ServeCore.

This package defines functions, calls and variables for programs, and sends the requests of their
sessions. It must import neither ServeCore nor the engines, only the protocol."""
