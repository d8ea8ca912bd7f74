"""``torch.cov`` and ``torch.corrcoef``, which look at values that a capture has not.

They are written as sums over rows, which are what numbers of the whole batch are put together of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from parallax.graph.common.replaced import replaced


def covariances_by_rows() -> AbstractContextManager[None]:
    """Compute them of a matrix by rows, as far as observations have no weights."""
    kind: Any = torch.Tensor
    original: dict[str, Callable[..., torch.Tensor]] = {"cov": torch.cov}

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
            return torch.ones((), dtype=input.dtype, device=input.device)
        covariance = cov(input)
        if not covariance.dim():  # of one variable
            return covariance / covariance
        deviations = covariance.diagonal().sqrt()
        return (covariance / deviations[:, None] / deviations).clip(-1, 1)

    functions = {"cov": cov, "corrcoef": corrcoef}
    return replaced(
        *(
            (where, name, function)
            for where in (torch, kind)
            for name, function in functions.items()
        )
    )


def _is_matrix(input: torch.Tensor) -> bool:
    return input.dim() == 2 and input.dtype.is_floating_point
