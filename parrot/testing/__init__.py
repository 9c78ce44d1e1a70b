"""Helper processes for tests of programs that were written for the original Parrot.
No server imports this package. The fakes of this project's own tests are in tests/support."""
