"""Settings of a run: one frozen, validated value, and the few environment variables."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parallax.errors import ConfigError

if TYPE_CHECKING:
    from parallax.strategy.builders.base import StrategyBuilder
    from parallax.strategy.data import Strategy

RunOption = Literal["HYBRID", "PS", "AR"]
RUN_OPTIONS: tuple[str, ...] = ("HYBRID", "PS", "AR")
DEFAULT_RUN_OPTION: RunOption = "HYBRID"

CompileMode = Literal["auto", "inductor", "none"]
COMPILE_MODES: tuple[str, ...] = ("auto", "inductor", "none")

DUMP_VARIABLE = "PARALLAX_DUMP"

DEFAULT_WORKERS = 2
MAX_LOCAL_WORKERS = 1024


@dataclass(frozen=True, init=False)
class Config:
    """Settings of a run.

    Args:
        run_option: how variables are synchronised. ``"HYBRID"``: AllReduce for dense variables, or
            factors of their gradients where these are faster, and row servers for sparse ones;
            ``"PS"``: owners for all; ``"AR"``: AllReduce and AllGather for all (Parallax paper,
            section 5). The short form of ``strategy``; None where that is given.
        strategy: what decides how variables are synchronised, instead of ``run_option``: the name
            of a builder (in any case of letters), a builder, the path of a strategy's file, or a
            strategy. None where ``run_option`` says it.
        search_partitions: tables that :func:`parallax.get_partitioner` marks are dealt to as many
            workers as turn out fastest in the first steps; else to as few as it says.
        workers: local workers when there is neither a resource file nor a CUDA device.
        average_dense: mean (else sum) of the workers' gradients of dense variables.
        average_sparse: the same for sparse variables.
        weigh_batches: in means a worker's batch counts by its rows, if all tensors of the first
            batches have the same first size on every worker; in means over some of the batch, such
            as labels that are not left out, by how many these are. Without this all batches count
            alike.
        sync_batch_norm: BatchNorm layers normalise over the batches of all workers, as one device
            would; also without it where a model has ``torch.nn.SyncBatchNorm``.
        redirect_path: directory that receives each worker's output as files, besides the console.
        compile: whether regions of the step are compiled by Inductor. ``"auto"``: when a run has
            computed for so long that it is likely to pay, each where it is measured to be faster;
            ``"inductor"``: all, after the first step; ``"none"``: none.
        seed: base of every worker's random numbers; worker ``w`` uses ``seed + w``. Without one,
            the chief's torch seed is the base.
        dump_dir: directory that receives each stage's result as text; ``PARALLAX_DUMP`` is its
            default.

    Raises:
        ConfigError: for an unknown name (with the nearest known one) or a value out of range.
    """

    run_option: RunOption | None = DEFAULT_RUN_OPTION
    strategy: str | Path | StrategyBuilder | Strategy | None = None
    search_partitions: bool = False
    workers: int = DEFAULT_WORKERS
    average_dense: bool = True
    average_sparse: bool = True
    weigh_batches: bool = True
    sync_batch_norm: bool = False
    redirect_path: str | None = None
    compile: CompileMode = "auto"
    seed: int | None = None
    dump_dir: str | None = None

    def __init__(
        self,
        *,
        run_option: RunOption | None = None,
        strategy: str | os.PathLike[str] | StrategyBuilder | Strategy | None = None,
        search_partitions: bool = False,
        workers: int = DEFAULT_WORKERS,
        average_dense: bool = True,
        average_sparse: bool = True,
        weigh_batches: bool = True,
        sync_batch_norm: bool = False,
        redirect_path: str | os.PathLike[str] | None = None,
        compile: CompileMode = "auto",
        seed: int | None = None,
        dump_dir: str | os.PathLike[str] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ConfigError(*_unknown_names(unknown))
        if strategy is not None and run_option is not None:
            raise ConfigError(
                f"run_option={run_option!r} and strategy={strategy!r} both say how variables are "
                "synchronised.",
                hint="give one of them; run_option is the short form of strategy.",
            )
        chosen = None if strategy is None else _strategy(strategy)
        values = {
            "run_option": _run_option(run_option) if chosen is None else None,
            "strategy": chosen,
            "search_partitions": _boolean("search_partitions", search_partitions),
            "workers": _integer("workers", workers, 1, MAX_LOCAL_WORKERS),
            "average_dense": _boolean("average_dense", average_dense),
            "average_sparse": _boolean("average_sparse", average_sparse),
            "weigh_batches": _boolean("weigh_batches", weigh_batches),
            "sync_batch_norm": _boolean("sync_batch_norm", sync_batch_norm),
            "redirect_path": _directory("redirect_path", redirect_path),
            "compile": _one_of("compile", compile, COMPILE_MODES),
            "seed": None if seed is None else _integer("seed", seed, 0, 2**63 - 1),
            "dump_dir": _directory("dump_dir", dump_dir or os.environ.get(DUMP_VARIABLE)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def source(self) -> str | Path | StrategyBuilder | Strategy:
        """What says how variables are synchronised: ``strategy``, or the builder that
        ``run_option`` names."""
        source = self.run_option if self.strategy is None else self.strategy
        assert source is not None
        return source

    @classmethod
    def of(cls, value: Config | Mapping[str, Any] | None) -> Config:
        """A Config from what a user passed: a Config, a mapping of its names, or nothing."""
        if value is None:
            return cls()
        if isinstance(value, Config):
            return value
        if isinstance(value, Mapping):
            return cls(**{str(key): item for key, item in value.items()})
        raise ConfigError(
            f"config must be a parallax.Config, found {type(value).__name__}.",
            hint='for example config=parallax.Config(run_option="HYBRID", workers=2).',
        )


def _unknown_names(unknown: Mapping[str, Any]) -> tuple[str]:
    known = [field.name for field in dataclasses.fields(Config)]
    parts = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        parts.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return (f"Config has no setting {', '.join(parts)}; it has {', '.join(known)}.",)


def _run_option(value: object) -> RunOption:
    if value is None:
        return DEFAULT_RUN_OPTION
    if isinstance(value, str) and value in RUN_OPTIONS:
        return value  # type: ignore[return-value]
    near = difflib.get_close_matches(str(value).upper(), RUN_OPTIONS, n=1)
    raise ConfigError(
        f'run_option must be "HYBRID", "PS" or "AR", found {value!r}.',
        hint=f'did you mean "{near[0]}"?' if near else "",
    )


def _strategy(value: object) -> object:
    """A builder's name as it is written, a path, a builder or a strategy."""
    # Not at the top: launchers and the command line run without torch.
    from parallax.strategy.builders import canonical_name, suggestion
    from parallax.strategy.builders.base import StrategyBuilder
    from parallax.strategy.data import Strategy

    if isinstance(value, StrategyBuilder | Strategy):
        return value
    if isinstance(value, os.PathLike):
        return Path(value)
    if isinstance(value, str):
        name = canonical_name(value)
        if name is not None:
            return name
        if value.endswith(".json") or os.sep in value:
            return Path(value)
        raise ConfigError(f"There is no strategy builder {value!r}.", hint=suggestion(value))
    if isinstance(value, type) and issubclass(value, StrategyBuilder):
        raise ConfigError(
            f"strategy is the class {value.__name__}.", hint=f"pass a builder: {value.__name__}()."
        )
    raise ConfigError(
        f"strategy must be a builder, its name, a strategy or its file, found {value!r}.",
        hint='for example strategy="auto", or strategy="strategy.json".',
    )


def _one_of(name: str, value: object, known: Sequence[str]) -> str:
    if value in known:
        return str(value)
    near = difflib.get_close_matches(str(value).lower(), known, n=1)
    options = ", ".join(f'"{one}"' for one in known)
    raise ConfigError(
        f"{name} must be one of {options}; found {value!r}.",
        hint=f'did you mean "{near[0]}"?' if near else "",
    )


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, found {value!r}.")
    return value


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, found {value!r}.")
    return value


def _directory(name: str, value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} must be a path, found {value!r}.")
    path = Path(value)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{name} must be a directory, but {path} is a file.")
    return str(path)
