"""``torch.cov``, ``torch.corrcoef``, which look at values that a capture has not, and ``einsum``.

They are written as sums over rows, which are what numbers of the whole batch are put together of,
also where a batch has one row, of which ``einsum`` multiplies elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from parallax.graph.common.replaced import replaced

_OVER_ROWS = re.compile(r"(\w)(\w),\1(\w)->(\2\3|\3\2)")
"""What adds up the rows of two matrices."""


def covariances_by_rows() -> AbstractContextManager[None]:
    """Compute them of a matrix by rows, as far as observations have no weights."""
    kind: Any = torch.Tensor
    original: dict[str, Callable[..., torch.Tensor]] = {
        name: getattr(torch, name) for name in ("cov", "corrcoef", "einsum")
    }

    def einsum(*args: Any) -> torch.Tensor:
        equation, *operands = args
        text = equation.replace(" ", "") if isinstance(equation, str) else ""
        found = _OVER_ROWS.fullmatch(text)
        if found is None or len({*found.group(1, 2, 3)}) < 3 or not all(map(_is_matrix, operands)):
            return original["einsum"](*args)
        first, second = operands
        if found[4] == found[3] + found[2]:
            first, second = second, first
        product: torch.Tensor = first.t() @ second
        return product

    def cov(
        input: torch.Tensor,
        *,
        correction: int = 1,
        fweights: torch.Tensor | None = None,
        aweights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if fweights is not None or aweights is not None or not _is_matrix(input):
            return original["cov"](
                input, correction=correction, fweights=fweights, aweights=aweights
            )
        rows = input.t()
        rows = rows - rows.mean(0)
        return (rows.t() @ rows / (rows.shape[0] - correction)).squeeze()

    def corrcoef(input: torch.Tensor) -> torch.Tensor:
        if not _is_matrix(input):
            return original["corrcoef"](input)
        covariance = cov(input)
        if not covariance.dim():  # of one variable
            return covariance / covariance
        deviations = covariance.diagonal().sqrt()
        return (covariance / deviations[:, None] / deviations).clip(-1, 1)

    found = {"cov": cov, "corrcoef": corrcoef}
    methods = [(kind, name, function) for name, function in found.items()]
    functions = [(torch, name, function) for name, function in found.items()]
    return replaced(*methods, *functions, (torch, "einsum", einsum))


def _is_matrix(input: Any) -> bool:
    return isinstance(input, torch.Tensor) and input.dim() == 2 and input.dtype.is_floating_point
