"""Engines: servers of Fill, Generate and FreeContext."""

import os

# OpenMP's threads wait for each other hundreds of times a step. By default they spin for
# milliseconds, so that on a machine with other work one step takes many time slices: measured, 1.4
# tokens/s instead of 17 with two busy neighbours on two cores. Never spinning costs a third of the
# speed on a machine without; a few microseconds of it (GNU's runtime, other ones only know the
# policy) keep both. Read when torch is loaded, hence so early.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
