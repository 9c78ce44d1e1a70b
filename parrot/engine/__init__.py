"""Engines: servers of Fill, Generate and FreeContext."""

import os

# OpenMP threads wait for each other hundreds of times per step. By default they spin for
# milliseconds. Next to other busy programs, one step then takes many time slices: 1.4 instead of 17
# tokens/s with two busy programs on two cores. Without any spinning, an idle machine loses a third
# of its speed. Spinning for a few microseconds avoids both. Only GNU's runtime reads the spin
# count. torch reads both variables when it is loaded, so they are set here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
