"""The sampling config as programs construct it."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from parrot.protocol import sampling
from parrot.utils.config import ConfigError, described
from parrot.utils.source_place import annotated_output

if TYPE_CHECKING:
    _NamesMistakes = type
else:

    class _NamesMistakes(type(BaseModel)):
        """A call such as `SamplingConfig(temprature=0)` raises `ConfigError`, which names the
        output and suggests a field."""

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                source = f"{annotated_output()}P.{cls.__name__}"
                raise ConfigError(described(cls, error, source)) from None


class SamplingConfig(sampling.SamplingConfig, metaclass=_NamesMistakes):
    __doc__ = sampling.SamplingConfig.__doc__
