"""Random weights, for measurements and tests."""

from collections.abc import Iterable, Mapping
from zlib import crc32

import torch

from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.parallel import Part
from parrot.engine.models.tensors import TensorPlan, is_matrix, source_shapes

_STD = 0.02  # Standard deviation of weights.
_CODES_STD = 4.6  # Standard deviation of codes of four bits.


class RandomTensors:
    """Normally distributed weights; norms are identities. Matrices may have random codes.

    Tensors are generated on their device. Equal names get equal tensors on devices of one kind."""

    def __init__(
        self, plans: Mapping[str, TensorPlan], seed: int, group: int | None = None
    ) -> None:
        """`group`: the matrices of layers have four bits, and a scale for this many inputs."""
        self._shapes = source_shapes(plans)
        self._matrices = {plan.source for name, plan in plans.items() if is_matrix(name)}
        self._seed = seed
        self._group = group

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def get(self, name: str, device: torch.device, part: Part | None = None) -> torch.Tensor:
        if (matrix := self._coded(name, device)) is not None:
            whole = matrix.numbers()
        elif len(shape := self._shapes[name]) == 1:
            whole = torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, device=device)
        else:
            whole = torch.empty(shape, device=device)
            whole.normal_(0.0, _STD, generator=self._generator(name, device))
        return whole if part is None else part.of(whole)

    def packed(
        self, name: str, device: torch.device, part: Part | None = None
    ) -> CodedMatrix | None:
        """A matrix with random codes, if the checkpoint has them."""
        whole = self._coded(name, device)
        return whole if whole is None or part is None else part.of_codes(whole)

    def gpu_formats(self, names: Iterable[str]) -> dict[str, CodeFormat]:
        """Empty: the configuration tells the format of random matrices."""
        return {}

    def _coded(self, name: str, device: torch.device) -> CodedMatrix | None:
        if self._group is None or name not in self._matrices:
            return None
        rows, columns = self._shapes[name]
        generator = self._generator(name, device)
        codes = torch.empty((rows, columns), dtype=torch.uint8, device=device)
        codes.random_(0, 16, generator=generator)
        groups = rows, columns // self._group
        factors = torch.rand(groups, device=device, generator=generator) + 0.5
        zeros = torch.randint(6, 11, groups, device=device, generator=generator)
        return CodedMatrix.with_zeros(codes, (factors * (_STD / _CODES_STD)).half(), zeros)

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self._seed ^ crc32(name.encode()))
