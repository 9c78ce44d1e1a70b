"""The sampling that a model's files recommend, for requests that do not set their own."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parrot.engine.models.tokenizers import read_json
from parrot.protocol.sampling import DefaultSampling

logger = logging.getLogger(__name__)

_FIELDS = tuple(DefaultSampling.model_fields)
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

EMBEDDED_SAMPLING = DefaultSampling(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
"""For the embedded model, whose file recommends nothing. A model of 135M parameters writes nonsense
at temperature 1, and repeats itself when it is greedy."""


def folder_sampling(folder: Path) -> DefaultSampling:
    """Read generation_config.json. With `do_sample` false the model is greedy."""
    path = folder / "generation_config.json"
    given = read_json(path)
    values = {name: given.get(name) for name in _FIELDS}
    if given.get("do_sample") is False:
        values["temperature"] = 0.0
    return _usable(values, str(path))


def gguf_sampling(metadata: Mapping[str, Any], source: str) -> DefaultSampling:
    """Read the keys of a GGUF file that begin with `general.sampling`."""
    return _usable({name: metadata.get(key) for name, key in _GGUF_KEYS.items()}, source)


def _usable(values: Mapping[str, Any], source: str) -> DefaultSampling:
    """Leave out the values that no request could have: they must not keep a model from serving."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            DefaultSampling.model_validate({name: value})
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            logger.warning("%s: `%s` is %.99r, which is ignored: %s", source, name, value, message)
        else:
            found[name] = value
    return DefaultSampling.model_validate(found)
