"""Parts of tests that benchmarks and earlier programs use too: a driver of runners, and processes
that return what they computed. Nothing that serves imports it; this project's fakes are in
tests/support."""
