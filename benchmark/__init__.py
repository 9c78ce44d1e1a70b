"""Everything that Parrot's figures are measured with, and the figures.

`results.py` writes and reads result files; `tables` renders them as pages, and `plots.py` as
pictures. The folders measure whole applications, ServeCore, engines and kernels.
"""
