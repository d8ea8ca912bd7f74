"""PowerSGD: a gradient as the product of two thin matrices, which are summed by AllReduce."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from parallax.strategy.encoders import Coder, Option, SumEncoder


class PowerSGD(SumEncoder):
    """A gradient of n × m as factors of rank r; r (n + m) numbers.

    One step of subspace iteration, which starts from the factor of the step before (Vogels,
    Karimireddy, Jaggi: PowerSGD, 2019, algorithm 1): P = M Q is summed and made orthonormal,
    Q = Mᵀ P is summed, and P Qᵀ is the gradient. What a worker's own gradient has outside of the
    span of P is its residual. Tensors of more dimensions are matrices of their first one and all
    others. Vectors, and matrices whose factors would be no smaller, travel as they are. NaN or
    infinity in any element make the whole gradient NaN, and the next step starts anew.

    Options: ``rank`` (4).
    """

    name = "powersgd"
    options = {"rank": Option(4, 1, 256, step=1)}

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See :meth:`SumEncoder.sizes`: of P, then of Q."""
        if len(shape) < 2 or not math.prod(shape):
            return ()
        rows, columns = shape[0], math.prod(shape[1:])
        rank = int(self.values["rank"])
        if rank * (rows + columns) >= rows * columns:
            return ()
        return rank * rows, rank * columns

    def coder(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Coder:
        """See :meth:`SumEncoder.coder`."""
        return _Factors(name, math.prod(shape[1:]), int(self.values["rank"]), dtype, device)


class _Factors(Coder):
    """One gradient's factors; ``memory`` is Qᵀ, [rank, columns]."""

    def __init__(
        self, name: str, columns: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
        generator = torch.Generator().manual_seed(seed)
        super().__init__(torch.randn(rank, columns, dtype=dtype, generator=generator).to(device))
        self._basis = self.memory.new_empty(0)

    def values(self, gradient: torch.Tensor, summed: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Coder.values`: P, then Qᵀ."""
        matrix = gradient.flatten(1)
        if summed is None:
            return matrix @ self.memory.t()
        self._basis = orthonormal(summed.view(len(matrix), -1))
        return self._basis.t() @ matrix

    def decode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """See :meth:`Coder.decode`."""
        torch.mm(self._basis, values.view(self.memory.shape), out=out.flatten(1))

    def remember(self, summed: torch.Tensor) -> None:
        """See :meth:`Coder.remember`."""
        # From zeros, or from NaN, no later step would find a way out.
        usable = torch.isfinite(summed).all() & (summed != 0).any()
        self.memory = torch.where(usable, summed.view(self.memory.shape), self.first)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of what the columns span; NaN if they are not finite."""
    if columns.device.type == "cpu" and not torch.isfinite(columns).all():
        return torch.full_like(columns, torch.nan)  # LAPACK may refuse them
    basis: torch.Tensor = torch.linalg.qr(columns).Q
    return basis


ENCODER = PowerSGD
