"""What tests and benchmarks beside this project's own share: an engine core's listener, a runner's
driver, and processes that return what they computed. Nothing that serves imports it; the fakes of
the three tiers are in tests/support."""
