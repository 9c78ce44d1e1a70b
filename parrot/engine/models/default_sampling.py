"""The sampling settings that a model's files recommend. Requests can override them."""

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

# Settings for the embedded model, whose file recommends none. At temperature 1 a model of 135M
# parameters writes nonsense, and greedy decoding repeats itself.
EMBEDDED_SAMPLING = DefaultSampling(temperature=0.2, top_p=0.9, repetition_penalty=1.1)


def folder_sampling(folder: Path) -> DefaultSampling:
    """Read generation_config.json. `do_sample: false` means greedy decoding."""
    path = folder / "generation_config.json"
    given = read_json(path)
    values = {name: given.get(name) for name in _FIELDS}
    if given.get("do_sample") is False:
        values["temperature"] = 0.0
    return _usable(values, str(path))


def gguf_sampling(metadata: Mapping[str, Any], source: str) -> DefaultSampling:
    """Read the keys `general.sampling.*` of a GGUF file."""
    return _usable({name: metadata.get(key) for name, key in _GGUF_KEYS.items()}, source)


def _usable(values: Mapping[str, Any], source: str) -> DefaultSampling:
    """Drop invalid values with a warning, so that they do not prevent a model from loading."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        try:
            DefaultSampling.model_validate({name: value})
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            logger.warning("%s: ignored `%s` %.99r: %s", source, name, value, message)
        else:
            found[name] = value
    return DefaultSampling.model_validate(found)
