"""The tables of README.md, docs/ and benchmark/results/*.md, rendered from the result files.

The text between these markers is generated:

    <!-- table: NAME [ARGUMENT] -->
    ...
    <!-- end -->

`python -m benchmark.tables` updates all pages. A test checks that the committed pages are current.
"""
