"""Transforms of prompts. Formatters clean up constants, and conversation templates make chats.

Each transform makes a new function from a function, before any call. It cannot see values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from parrot.frontend.pfunc.function import SemanticFunction


class FuncMutator(ABC):
    @abstractmethod
    def transform(self, func: SemanticFunction) -> SemanticFunction:
        """A new function. `func` does not change."""


class Sequential(FuncMutator):
    """Applies several transforms in order."""

    def __init__(self, mutators: Sequence[FuncMutator]) -> None:
        self._mutators = tuple(mutators)

    def transform(self, func: SemanticFunction) -> SemanticFunction:
        for mutator in self._mutators:
            func = mutator.transform(func)
        return func
