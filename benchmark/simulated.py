"""Texts, engines and ServeCore settings of benchmarks on virtual time."""

import random
from pathlib import Path
from typing import Any

from benchmark.results import ROOT
from parrot.engine.config import SimConfig
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.simulation import PATIENT

ENGINES = ROOT / "sample_configs" / "engine"
LETTERS = "abcdefghijklmnopqrstuvwxyz      "


def words(draw: random.Random, size: int) -> str:
    """A text of `size` letters. Each letter is a token of a `sim` engine."""
    return "".join(draw.choices(LETTERS, k=size))


def core_config(**scheduler: Any) -> CoreConfig:
    """A ServeCore without timeouts, with these keys of its global scheduler."""
    settings = GlobalSchedulerConfig.model_validate(scheduler)
    return PATIENT.model_copy(update={"global_scheduler": settings})


def sim_engine(path: Path) -> SimConfig:
    return SimConfig.model_validate_json(path.read_text())


def changed(config: SimConfig, **changes: Any) -> SimConfig:
    """The config with changed values of these keys, written with dots. Raises `ValueError` for an
    unknown key."""
    payload = config.model_dump()
    for path, value in changes.items():
        *parents, name = path.split(".")
        section = payload
        for parent in parents:
            section = section[parent]
        if name not in section:
            raise ValueError(f"engines have no key {path!r}")
        section[name] = value
    return SimConfig.model_validate(payload)
