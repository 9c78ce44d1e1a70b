"""Random matrices in e4m3 on the device, and their exact products."""

import torch

from parrot.engine.models.fp8 import Fp8Matrix, row_codes


def random_matrix(outputs: int, inputs: int) -> Fp8Matrix:
    """With a scale for each output that is no power of two."""
    found = Fp8Matrix.of(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5)
    return Fp8Matrix(found.codes, found.scales * (torch.rand(outputs, device="cuda") + 0.5))


def product(x: torch.Tensor, weight: Fp8Matrix) -> torch.Tensor:
    """The product of rows that are rounded to e4m3, in float64."""
    codes, powers = row_codes(x)
    return codes.double() @ weight.numbers().double().T * powers.double()
