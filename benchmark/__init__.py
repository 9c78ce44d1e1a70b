"""The benchmarks of Parrot and their results.

`results.py` runs a benchmark's command, and writes and reads result files. `tables` renders them as
pages, `plots.py` as pictures. The folders measure whole applications, ServeCore, engines and
kernels. `simulated.py` has the parts that benchmarks on virtual time share.
"""
