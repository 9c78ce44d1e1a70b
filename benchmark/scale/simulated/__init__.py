"""A cluster of thousands of engines in virtual time: what `benchmark.scale.simulate` is made of.

ServeCore is the real one; engines, programs and what divides them among ServeCores are models."""
