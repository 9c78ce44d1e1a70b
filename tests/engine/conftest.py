"""Torch must not be loaded before `parrot.engine` has settled how its threads wait."""

import parrot.engine  # noqa: F401
