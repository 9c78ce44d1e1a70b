"""Transforms of prompts: formatters tidy up constants, conversation templates make chats.

Each makes a new function from a function before it is called. None may look at values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from parrot.frontend.pfunc.function import SemanticFunction


class FuncMutator(ABC):
    @abstractmethod
    def transform(self, func: SemanticFunction) -> SemanticFunction:
        """A new function; `func` stays as it is."""


class Sequential(FuncMutator):
    """Applies several transforms, one after the other."""

    def __init__(self, mutators: Sequence[FuncMutator]) -> None:
        self._mutators = tuple(mutators)

    def transform(self, func: SemanticFunction) -> SemanticFunction:
        for mutator in self._mutators:
            func = mutator.transform(func)
        return func
