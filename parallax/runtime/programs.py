"""The programs of a runner, by what they are valid for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallax.graph.common.sizes import Place, Shapes, shapes_of, varying
from parallax.graph.symbols.guesses import Branch, Guesses
from parallax.runtime.program import Program
from parallax.runtime.signature import Signature, shapes_in, without_shapes

logger = logging.getLogger("parallax")

MOST = 32
"""Signatures whose programs are kept, those used last; and programs of one."""
MANY = 6
"""Programs of one signature, after which the user is told."""


@dataclass
class _Kin:
    """Signatures that differ in nothing but the sizes of the batch."""

    seen: list[Shapes] = field(default_factory=list)
    fixed: set[Place] = field(default_factory=set)
    """Sizes that were tried as symbols and are part of the graph."""
    programs: list[Program] = field(default_factory=list)
    """Those that hold for more than one shape."""


def _deciding(programs: Sequence[Program]) -> Branch | None:
    """A branch on what is computed that does not go the same way in all programs."""
    decisions = [program.step.decisions for program in programs]
    return next(
        (one for one in decisions[-1] if len({known.get(one) for known in decisions} - {None}) > 1),
        None,
    )


class Programs:
    """Finds the program of a call: by its signature, or one whose sizes are free to vary."""

    def __init__(self, guesses: Guesses) -> None:
        """
        Args:
            guesses: which ways branches took last.
        """
        self._guesses = guesses
        self._by_signature: OrderedDict[Signature, list[Program]] = OrderedDict()
        self._kin: dict[Signature, _Kin] = {}
        self._settled: OrderedDict[tuple[int, ...], tuple[Program, Shapes]] = OrderedDict()

    def settle(self, digests: tuple[int, ...], program: Program, flat: Sequence[Any]) -> None:
        """Keep what is run where workers have programs of these digests, by worker, with a flat
        batch."""
        self._settled[digests] = program, shapes_of(flat)
        if len(self._settled) > MOST:
            self._settled.popitem(last=False)

    def settled(self, digests: tuple[int, ...], flat: Sequence[Any]) -> Program | None:
        """What was kept for this, if it holds for a flat batch."""
        program, shapes = self._settled.get(digests, (None, ()))
        if program is None or not self._holds(program, flat):
            return None
        sizes, own = program.step.sizes, shapes_of(flat)
        fits = own == shapes if sizes is None else sizes.fits(own)
        if not fits:
            return None
        self._settled.move_to_end(digests)
        return program

    def coming(self, signature: Signature, flat: Sequence[Any]) -> Program | None:
        """What a later call will find; None if that is not known, as where a step draws numbers."""
        kin = self._kin.get(without_shapes(signature))
        near = [*self._by_signature.get(signature, ()), *(kin.programs if kin is not None else ())]
        return None if any(one.step.draws for one in near) else self.find(signature, flat)

    def find(self, signature: Signature, flat: Sequence[Any]) -> Program | None:
        """A program that holds for a call with a flat batch; None if it has to be captured. What it
        draws is drawn."""
        candidates = self._by_signature.get(signature)
        if candidates is not None:
            self._by_signature.move_to_end(signature)
            for program in candidates:
                if self._holds(program, flat):
                    return program
        kin = self._kin.get(without_shapes(signature))
        if kin is None:
            return None
        shapes = shapes_in(signature)
        for program in kin.programs:
            assert program.step.sizes is not None
            if program.step.sizes.fits(shapes) and self._holds(program, flat):
                self._keep(signature, program)
                return program
        return None

    def _holds(self, program: Program, flat: Sequence[Any]) -> bool:
        return self._guesses.agree(program.step.decisions) and program.guards_hold(flat)

    def varying(self, signature: Signature) -> Mapping[Place, int]:
        """Which sizes should be symbols, now that a call has to be captured."""
        kin = self._kin.get(without_shapes(signature))
        if kin is None:
            return {}
        found = varying([*kin.seen, shapes_in(signature)])
        return {place: number for place, number in found.items() if place not in kin.fixed}

    def add(self, signature: Signature, program: Program, tried: Mapping[Place, int]) -> None:
        """Keep a program that was captured for a call.

        Args:
            tried: the sizes that were to be symbols.
        """
        kin = self._kin.setdefault(without_shapes(signature), _Kin())
        kin.seen.append(shapes_in(signature))
        sizes = program.step.sizes
        kin.fixed |= tried.keys() if sizes is None else sizes.settled()
        if sizes is not None:
            kin.programs.append(program)
        self._keep(signature, program)

    def clear(self) -> None:
        """Forget all programs; what is known of sizes stays."""
        self._by_signature.clear()
        self._settled.clear()
        for kin in self._kin.values():
            kin.programs.clear()

    def rebind(self) -> None:
        """After the user's objects were replaced: keep the programs that still have their state."""
        bound = {
            program: program.rebind()
            for programs in self._by_signature.values()
            for program in programs
        }
        for signature, programs in self._by_signature.items():
            self._by_signature[signature] = [program for program in programs if bound[program]]
        for kin in self._kin.values():
            kin.programs = [program for program in kin.programs if bound.get(program)]
        for digests, (program, _) in list(self._settled.items()):
            if not (bound[program] if program in bound else program.rebind()):
                del self._settled[digests]

    def _keep(self, signature: Signature, program: Program) -> None:
        programs = self._by_signature.setdefault(signature, [])
        programs.append(program)
        if len(programs) == MANY and (branch := _deciding(programs)) is not None:
            logger.warning(
                "the step was captured %d times for one kind of batch, as branches on what it "
                "computes go other ways (%s): choose with torch.where, or multiply by a mask",
                MANY,
                branch.place,
            )
        elif len(programs) == MANY and program.step.guards:
            logger.warning(
                "the step was captured %d times for one kind of batch, as its Python decides "
                "otherwise by numbers (a learning rate, a number of the batch): keep float(), "
                "int() and functions of Python's numbers out of it, or pass a tensor",
                MANY,
            )
        if len(programs) > MOST:
            programs.pop(0)
        if len(self._by_signature) <= MOST:
            return
        self._by_signature.popitem(last=False)
        used = {one for programs in self._by_signature.values() for one in programs}
        for kin in self._kin.values():
            kin.programs = [one for one in kin.programs if one in used]
