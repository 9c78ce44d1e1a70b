"""Stand-ins and checks for tests, of this project and of programs that use it.

The room owns fakes of the three tiers (`FakeServe`, `FakeEngine`, `FakeOpenAI`), tiny models and
runners that check what they are told. It is imported by tests and benchmarks only; nothing that
serves knows it."""
