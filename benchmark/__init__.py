"""Everything that Parrot's figures are measured with, and the figures.

`results.py` runs a benchmark's command, and writes and reads result files; `tables` renders them as
pages, and `plots.py` as pictures. The folders measure whole applications, ServeCore, engines and
kernels; `session.py` and `simulated.py` are what they ask ServeCore with, and simulate it with.
"""
