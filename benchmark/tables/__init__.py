"""The tables of README.md, docs/ and benchmark/results/*.md, rendered from the result files.

A page has markers, and what stands between them is generated:

    <!-- table: NAME [ARGUMENT] -->
    ...
    <!-- end -->

`python -m benchmark.tables` renews all pages. A test compares them with what is committed.
"""
