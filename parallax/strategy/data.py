"""A strategy as data: how each variable is synchronised. Frozen, typed, JSON in and out."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Variable

SCHEMA_VERSION = 2

PartitionName = Literal["whole", "cyclic", "block"]
HierarchyName = Literal["flat", "hosts"]
ReductionName = Literal["auto", "ring", "tree", "halving"]
MemoryName = Literal["device", "host"]


@functools.cache
def everyone(workers: int) -> tuple[int, ...]:
    """All workers by number; always the same object, which many decisions share."""
    return tuple(range(workers))


class VariableStrategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one variable is synchronised.

    Args:
        synchronizer: ``allreduce`` (dense gradient summed by all), ``allgather`` (rows of a sparse
            gradient gathered by all), ``rows`` (row servers: pull and push of touched rows),
            ``bags`` (as rows, but owners sum the rows of a bag before they travel),
            ``owner`` (owners pull-push dense values), ``scatter`` (the same, but values are
            gathered when they are read), ``factors`` and ``factor_push`` (gradients that are matrix
            products, as their factors to all or to the owner), ``broadcast`` (gradients from each
            worker to all), ``none`` (it receives no gradient), or one of another package, see
            :mod:`parallax.strategy.registry`.
        partition: ``whole`` (one owner), ``cyclic`` (row i on owner i mod n), ``block``
            (consecutive rows).
        owners: workers that own a shard; empty when every worker holds the variable.
        axis: along which it is partitioned; 0 are the rows.
        shards: sizes of consecutive shards along the axis, one for each owner; empty for shards of
            even size. For partition ``block``.
        average: mean over workers, else sum.
        hierarchy: ``flat`` (all workers alike) or ``hosts`` (inside each host first, then between
            hosts), for ``allreduce`` and ``rows``: dense gradients are summed, rows and their
            gradients are merged in a host before they cross to another.
        reduction: how a sum of all workers is made: ``ring``, ``tree``, ``halving`` (recursive
            halving and doubling), or ``auto`` (as the backend does).
        order: of the workers in the ring or tree; empty for the order of their numbers.
        encoder: what gradients are encoded by while they travel, a name of the registry of
            encoders; ``none`` sends them as they are.
        encoder_options: numbers that the encoder takes, by name.
        memory: where an owner keeps its shard: in the memory of its ``device`` or of its ``host``,
            which is the same for workers that compute on CPUs, and not supported on others yet.
        staleness: steps that a worker may be behind the others; 0 is the only value so far.
        group: gradients of one synchroniser with the same number travel together, and groups
            start in the order of their numbers.
        late_turn: in steps that leave updates to the next one, the place of its message among
            those of dense gradients, which then start in another order, the least of its
            variables'; 0 for the order of groups.
        pieces: how many parts of its rows a gradient is cut into, each of which travels as soon as
            it is computed; for flat ``allreduce``.
        pull_group: rows of tables with the same number are fetched together.
        why: the reason, for people.
    """

    synchronizer: str
    partition: PartitionName = "whole"
    owners: tuple[int, ...] = ()
    axis: int = 0
    shards: tuple[int, ...] = ()
    average: bool = True
    hierarchy: HierarchyName = "flat"
    reduction: ReductionName = "auto"
    order: tuple[int, ...] = ()
    encoder: str = "none"
    encoder_options: dict[str, float] = {}
    memory: MemoryName = "device"
    staleness: int = 0
    group: int = 0
    late_turn: int = 0
    pieces: int = 1
    pull_group: int = 0
    why: str = ""


class _Header(msgspec.Struct):
    """What is read of a strategy first: the rest may look different in another version."""

    version: int = SCHEMA_VERSION


class _Entries(msgspec.Struct):
    """The variables' entries, unread."""

    variables: dict[str, msgspec.Raw]


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision for every variable, tied to one model and number of workers.

    Args:
        fingerprint: of the model, see :func:`fingerprint`.
        replicas: workers that it is for.
        variables: by name, how each is synchronised.
        model: by name, what was hashed: only to say what differs where the fingerprint does.
        version: of this schema.
    """

    fingerprint: str
    replicas: int
    variables: dict[str, VariableStrategy]
    model: dict[str, str] = {}
    version: int = SCHEMA_VERSION

    def to_json(self) -> bytes:
        """The strategy as JSON, with variables in their order and usual settings left out."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes | str) -> Strategy:
        """Read a strategy.

        Raises:
            StrategyError: not JSON, of another version, or with a wrong field (named by its path).
        """
        try:
            version = msgspec.json.decode(text, type=_Header).version
            if version != SCHEMA_VERSION:
                raise StrategyError(
                    f"The strategy has schema version {version}; this parallax reads "
                    f"{SCHEMA_VERSION}.",
                    hint="make it anew with this version: run the script once, or parallax plan.",
                )
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise StrategyError(f"This is no strategy: {_where(text)}{error}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the strategy as JSON, for a person to read and edit.

        Raises:
            StrategyError: the file cannot be written.
        """
        try:
            Path(path).write_bytes(self.to_json() + b"\n")
        except OSError as error:
            raise StrategyError(
                f"The strategy's file {os.fspath(path)!r} cannot be written: {error.strerror}.",
                hint="name a file in a directory that is there.",
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Strategy:
        """The strategy that :meth:`save` wrote, or a person.

        Raises:
            StrategyError: the file cannot be read or holds no strategy; names the file.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise StrategyError(
                f"The strategy's file {os.fspath(path)!r} cannot be read: {error.strerror}.",
                hint="runner.strategy.save(path) writes one, and so does `parallax plan --save`.",
            ) from error
        try:
            return cls.from_json(text)
        except StrategyError as error:
            raise StrategyError(f"{os.fspath(path)}: {error.problem}", hint=error.hint) from error


def _where(text: bytes | str) -> str:
    """The first variable whose entry cannot be read, which the decoder does not name."""
    try:
        entries = msgspec.json.decode(text, type=_Entries).variables
    except msgspec.DecodeError:
        return ""
    for name, entry in entries.items():
        try:
            msgspec.json.decode(entry, type=VariableStrategy)
        except msgspec.DecodeError:
            return f"{name!r}: "
    return ""


def described(variables: Iterable[Variable]) -> dict[str, str]:
    """By name, dtype and shape of variables, such as ``float32 20×4``."""
    return {
        v.name: f"{str(v.dtype).removeprefix('torch.')} {'×'.join(map(str, v.shape)) or 'scalar'}"
        for v in variables
    }


def fingerprint(variables: Iterable[Variable]) -> str:
    """What ties a strategy to a model: names, shapes and dtypes of its variables, hashed."""
    text = "\n".join(f"{v.name} {v.shape} {v.dtype}" for v in variables)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
