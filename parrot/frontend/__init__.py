"""The front ends: what programs import to call a ServeCore.

The room owns how functions, calls and variables look to a program, and one session's exchanges with
the service. It must not know ServeCore or the engines but by the protocol."""
