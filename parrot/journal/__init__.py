"""The journal: what a ServeCore that died goes on from.

Owns what is written down, the thread that writes it, the stores that keep it, and what does it once
more. ServeCore knows it as a `CommandLog`, and without one passes nothing of it."""
