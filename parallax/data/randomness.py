"""Random numbers that are the same on every worker, beside those that must differ.

Workers can agree on an order without talking to each other only if each draws it from the same
numbers. But the rest of a worker's random numbers, such as dropout's, must differ from the other
workers', and must not depend on how much data was read. So the generators that data code uses
without naming them (those of torch, ``random`` and NumPy) are exchanged for common ones while an
order is drawn or a stream is read, and put back afterwards.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from parallax.data.identity import worker_identity

__all__ = ["CommonRandom", "OwnRandomInit", "derived_seed"]


def derived_seed(*parts: int) -> int:
    """A seed from several numbers; near numbers give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    # One bit less, as torch takes seeds up to 2**63 without a change of sign.
    return int.from_bytes(digest, "big") >> 1


def _seed_all(seed: int) -> None:
    # torch.manual_seed would also seed the CUDA devices, whose numbers belong to the model.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass(frozen=True)
class _States:
    torch_state: torch.Tensor
    python_state: Any
    # The object rather than its state, which NumPy takes longer to copy than all the rest.
    numpy_generator: np.random.BitGenerator

    @classmethod
    def taken(cls) -> _States:
        return cls(torch.get_rng_state(), random.getstate(), get_bit_generator())

    def put(self) -> None:
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        set_bit_generator(self.numpy_generator)


class CommonRandom:
    """A context in which the global generators continue one sequence that all workers share.

    It can be entered many times; each time it goes on where it was left. An exchange takes about
    0.1 ms, so enter it once for a batch rather than for an item.

    Args:
        seed: where the sequence starts, the same on every worker.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: _States | None = None
        self._outside: _States | None = None
        self._outside_numpy: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outside_numpy = np.random.get_state(legacy=False)
        self._outside = _States.taken()
        if self._inside is None:
            set_bit_generator(np.random.MT19937())
            _seed_all(self._seed)
        else:
            self._inside.put()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._outside is not None
        self._inside = _States.taken()
        self._outside.put()
        if self._outside_numpy["has_gauss"]:
            # NumPy draws normal numbers in pairs, and forgets the second one in an exchange. Inside
            # it may: there, all workers forget the same.
            np.random.set_state(self._outside_numpy)


class OwnRandomInit:
    """A ``worker_init_fn`` that makes loader processes of different workers draw differently.

    A loader process is seeded by a number from its DataLoader's generator. With the same generator,
    or the same ``torch.manual_seed``, on every worker, the k-th items of all workers would get the
    same random crop and the same noise.

    Args:
        user_init: the user's own ``worker_init_fn``, called afterwards.
    """

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self.user_init = user_init

    def __call__(self, loader_process: int) -> None:
        shard, shards = worker_identity()
        if shards > 1:
            _seed_all(derived_seed(torch.initial_seed(), shard))
        if self.user_init is not None:
            self.user_init(loader_process)
