"""Python's own functions of numbers, for what is only known when the step runs: ``float(loss)``,
``int(correct.sum())``, ``max(loss.item(), 0.5)``, ``len(selected)``.

Python has ``float()``, ``int()`` and ``len()`` give numbers of its own, and there are none while a
step is captured. Where the step's code asks for one, the names stand for others in that module,
which give symbols, and the step is captured again.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from parallax.errors import DataDependentError
from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import FakeTensor
from parallax.graph.common.user_code import is_internal
from parallax.graph.symbols.assertions import EndsError, UndecidedError

T = TypeVar("T")
_OF_NUMBERS = ("float", "int", "range")
_OF_SIZES = ("len",)
_SYMBOLS = torch.SymFloat | torch.SymInt | torch.SymBool
_SIZES = (torch.SymInt, torch.SymFloat)


class _Place(NamedTuple):
    """A module of the user's, and a name in it that stands for Python's own function."""

    module: str
    name: str


class Conversions:
    """Where the code that a step reaches makes numbers of what it computes.

    It is found by capturing: what is known of one capture is so for the next.
    """

    def __init__(self) -> None:
        self._globals: dict[_Place, dict[str, Any]] = {}
        self._left: set[_Place] = set()
        """Where a symbol does not do."""

    def look(self, refusal: DataDependentError, names: Collection[str] = _OF_NUMBERS) -> None:
        """See whether the running line of the user's calls such a function.

        Args:
            refusal: if it does not.
            names: of the functions.

        Raises:
            UnconvertedError: it does, and this was not known.
        """
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        for name in set(names) & set(frame.f_code.co_names):
            place = _Place(str(frame.f_globals.get("__name__")), name)
            is_pythons = name not in frame.f_globals and name not in frame.f_locals
            if is_pythons and place not in self._globals and place not in self._left:
                self._globals[place] = frame.f_globals
                raise UnconvertedError(refusal, place)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Let the names in these modules give symbols."""

        def length(tensor: torch.Tensor) -> int:
            rows: Any = tensor.shape[0] if tensor.dim() else 0
            if isinstance(rows, torch.SymInt):
                self.look(DataDependentError("The length of a tensor is not known."), _OF_SIZES)
            return _torchs_length(tensor)

        def number(truth: torch.SymBool) -> float:
            self.look(DataDependentError("The truth is not known."), ("float",))
            return float(bool(truth))

        def index(size: torch.SymInt) -> int:
            if not is_internal(sys._getframe(1).f_code.co_filename):  # as in float(size)
                self.look(DataDependentError("The size is not known."), ("float",))
            return _torchs_index(size)

        def whole(number: torch.SymInt | torch.SymFloat) -> int:
            if not is_internal(sys._getframe(1).f_code.co_filename):
                self.look(DataDependentError("The number is not known."), ("int",))
            return _torchs_int[type(number)](number)

        places = [one for one in self._globals.items() if one[0] not in self._left]
        for place, names in places:
            names[place.name] = _FUNCTIONS[place.name]
        try:
            with replaced(
                (builtins, "max", _extreme(max, torch.sym_max, torch.gt, "min")),
                (builtins, "min", _extreme(min, torch.sym_min, torch.lt, "max")),
                (torch.nn.functional, "one_hot", _one_hot),
                (torch.nn.utils.clip_grad, "float", _Float),  # of bounds that the step computes
                *((owner, "equal", _equal) for owner in (torch, torch.Tensor)),
                *((owner, "allclose", _all_close) for owner in (torch, torch.Tensor)),
                (FakeTensor, "__len__", length),
                (torch.SymInt, "__index__", index),
                *((kind, "__int__", whole) for kind in _torchs_int),
                (torch.SymBool, "__float__", number),
            ):
                yield
        finally:
            for place, names in places:
                names.pop(place.name, None)

    def captured(self, capture: Callable[[], T]) -> T:
        """Capture a step, again for each place that is found.

        Where a symbol does not do, Python's number is taken as before, if there can be one.
        """
        found: list[_Place] = []
        while True:
            try:
                return capture()
            except UnconvertedError as error:
                found.append(error.place)
            except (EndsError, UndecidedError):
                raise
            except Exception:
                if not found:
                    raise
                self._left.update(found)
                with contextlib.suppress(Exception):
                    return capture()
                self._left.difference_update(found)
                raise


class UnconvertedError(DataDependentError):
    """Python asks for a number where a symbol may do. Not for users to see."""

    def __init__(self, refusal: DataDependentError, place: _Place) -> None:
        super().__init__(refusal.problem, hint=refusal.hint, where=refusal.where)
        self.place = place


class _Kind(type):
    """The kind of a class that stands for one of Python's numbers, but for what it makes of
    symbols and tensors."""

    python: type
    of_tensor: Callable[[torch.Tensor], Any]
    of_size: Callable[[Any], Any]

    def __call__(cls, *values: Any, **named: Any) -> Any:
        if len(values) == 1 and not named and is_unknown(values[0]):
            return cls.of_tensor(_as_tensor(values[0]))
        if len(values) == 1 and not named and isinstance(values[0], _SIZES):
            return cls.of_size(values[0])
        return cls.python(*values, **named)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.python)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.python)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.python, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.python

    def __hash__(cls) -> int:
        return hash(cls.python)


class _Float(metaclass=_Kind):
    python = float
    of_size = torch.sym_float

    @staticmethod
    def of_tensor(value: torch.Tensor) -> Any:
        return (value if value.is_floating_point() else value.to(torch.float64)).item()


class _Int(metaclass=_Kind):
    python = int
    of_size = torch.sym_int

    @staticmethod
    def of_tensor(value: torch.Tensor) -> Any:
        return value.to(torch.int64).item()


class _Range(metaclass=_Kind):
    """Places up to a number, for ``scores[range(n), labels]``: nobody can go through them."""

    python = range
    of_size = range

    @staticmethod
    def of_tensor(value: torch.Tensor) -> Any:
        return torch.arange(value.to(torch.int64).item())


def _length(value: Any) -> Any:
    """``len``, which may be a symbol of tensors."""
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    return len(value)


_torchs_length: Callable[[torch.Tensor], int] = torch.Tensor.__len__
_torchs_index: Callable[[torch.SymInt], int] = torch.SymInt.__index__
_torchs_int: dict[type, Callable[..., int]] = {kind: kind.__int__ for kind in _SIZES}
_FUNCTIONS: dict[str, Any] = {"float": _Float, "int": _Int, "range": _Range, "len": _length}


def is_unknown(value: Any) -> bool:
    """Whether a number, or a tensor of one, is only known when the step runs."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, _SYMBOLS) and not value.node.has_hint()


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    kinds = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64, torch.SymBool: torch.bool}
    return torch.scalar_tensor(value, dtype=kinds[type(value)], device="cpu")


def _one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> torch.Tensor:
    """With as many classes as the largest label says, where none are given: PyTorch's own wants
    that number for itself."""
    if isinstance(num_classes, int) and num_classes != -1:
        return _torchs_one_hot(tensor, num_classes)
    if isinstance(num_classes, int):
        num_classes = tensor.max().item() + 1
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _equal(one: torch.Tensor, other: torch.Tensor) -> Any:
    """A symbol, where PyTorch's own gives Python a truth."""
    if not _is_fake(one, other):
        return _torchs_equal(one, other)
    if one.shape != other.shape:
        return False
    return (one == other).all().item()


def _all_close(
    one: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> Any:
    """The same of ``torch.allclose``."""
    if not _is_fake(one, other):
        return _torchs_all_close(one, other, rtol, atol, equal_nan)
    return torch.isclose(one, other, rtol, atol, equal_nan).all().item()


def _is_fake(*tensors: torch.Tensor) -> bool:
    """Whether tensors have no values."""
    return any(isinstance(one, FakeTensor) for one in tensors)


_torchs_equal, _torchs_all_close = torch.equal, torch.allclose
_torchs_one_hot = torch.nn.functional.one_hot


def _extreme(
    python: Callable[..., Any],
    symbolic: Callable[..., Any],
    is_better: Callable[..., Any],
    bound: str,
) -> Callable[..., Any]:
    """``max`` or ``min``: of equal ones the first, as of Python's.

    Args:
        python: the function.
        symbolic: of two symbols.
        is_better: whether the second of two is taken.
        bound: the argument of ``torch.clamp`` for a number that bounds a tensor.
    """

    def better(one: Any, other: Any) -> Any:
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            tensor, number = _apart(one, other)
            if number is not None and not tensor.requires_grad:
                return torch.clamp(tensor, **cast(Any, {bound: number}))
            return torch.where(is_better(*_tensors(other, one)), other, one)
        if is_unknown(one) or is_unknown(other):
            return symbolic(one, other)
        return python(one, other)

    def called(*values: Any, **named: Any) -> Any:
        if named or is_internal(sys._getframe(1).f_code.co_filename):
            return python(*values, **named)
        if len(values) != 1:
            return _folded(values, better, python)
        return _folded(list(values[0]), better, python)

    return called


def _folded(
    values: Sequence[Any], better: Callable[[Any, Any], Any], python: Callable[..., Any]
) -> Any:
    numbers = all(isinstance(one, int | float | _SYMBOLS) or is_unknown(one) for one in values)
    if not numbers or not any(map(is_unknown, values)):
        return python(values)
    found = values[0]
    for value in values[1:]:
        found = better(found, value)
    return found


def _apart(one: Any, other: Any) -> tuple[Any, int | float | None]:
    """A tensor and a number of Python's, if they are that."""
    if not isinstance(one, torch.Tensor):
        one, other = other, one
    return one, other if isinstance(other, int | float) else None


def _tensors(one: Any, other: Any) -> tuple[Any, Any]:
    """Two numbers to compare, the first of them as a tensor."""
    if isinstance(one, torch.Tensor):
        return one, other
    return torch.scalar_tensor(one, dtype=other.dtype, device=other.device), other
