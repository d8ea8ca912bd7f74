"""``parallax plan``: what a script would send on the hosts of a resource file, without them."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from parallax.cluster.code_files import program_files
from parallax.cluster.environment import refuse_nested_launch
from parallax.cluster.local_workers import workers_here
from parallax.cluster.planned import PlannedCluster, plan_cluster
from parallax.cluster.resources import read_resources
from parallax.config import Config
from parallax.errors import ConfigError, ParallaxError, PlanError

if TYPE_CHECKING:
    from parallax.runtime.planning import Planning

__all__ = ["HELP", "add_arguments", "run"]

HELP = "show how a script would be distributed over the hosts of a resource file, without them"
_OPTION = "--resource-info"
_EXAMPLE = "for example `parallax plan train.py --epochs 3 --resource-info hosts.yml`."
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.usage = (
        "parallax plan [options] (train.py | -- -m module) [arguments] --resource-info FILE\n"
        "       parallax plan [options] --resource-info FILE -- (train.py | -m module) [arguments]"
    )
    parser.add_argument(_OPTION, metavar="FILE", help="the hosts: text or YAML; none is contacted")
    parser.add_argument(
        "--strategy",
        metavar="NAME_OR_FILE",
        help="a builder or a strategy's file, in place of what the script asks for",
    )
    parser.add_argument("--save", metavar="FILE", help="write the strategy that was planned")
    parser.add_argument("script", metavar="train.py", help="the script, or -m, after --")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; the exit status.

    Raises:
        ConfigError: the file or the script is wrong.
        LaunchError: this process is a worker.
        PlanError: the script fails or ends before its first step.
        ParallaxError: its step cannot be captured or distributed.
    """
    refuse_nested_launch()
    file, words = arguments.resource_info, list(arguments.arguments)
    if file is None:
        file, words = _take_option(words)
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    program_files(arguments.script, words, places, _EXAMPLE)
    spec = read_resources(file)
    if any(host.cpus is not None for host in spec.hosts):
        # As on the hosts themselves; before torch looks.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    known = all(host.workers is not None for host in spec.hosts)
    usual = 1 if known else workers_here(None, Config().workers)
    try:
        cluster = plan_cluster(spec, usual)
        planning = _plan(arguments.script, words, cluster, arguments.strategy)
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(planning.report())
    if arguments.save is not None:
        assert planning.plan is not None
        assert planning.plan.strategy is not None
        planning.plan.strategy.save(arguments.save)
        print(f"its strategy is in {arguments.save}")
    return 0


def _take_option(words: list[str]) -> tuple[str, list[str]]:
    """The file, and the script's own arguments, from all that follows the script's name.

    Raises:
        ConfigError: no file is named.
    """
    for at, word in enumerate(words):
        if word == _OPTION and at + 1 < len(words):
            return words[at + 1], words[:at] + words[at + 2 :]
        if word.startswith(f"{_OPTION}="):
            return word.partition("=")[2], words[:at] + words[at + 1 :]
    raise ConfigError("--resource-info FILE is missing: the hosts to plan for.", hint=_EXAMPLE)


def _plan(script: str, words: list[str], cluster: PlannedCluster, strategy: str | None) -> Planning:
    """Runs the program up to its first step.

    Raises:
        ConfigError: there is no such strategy.
        PlanError: it fails or ends before.
        ParallaxError: its step cannot be captured or distributed.
    """
    from parallax.runtime.planning import PlanMade, start_planning, stop_planning

    chosen = None if strategy is None else Config(strategy=strategy).strategy
    planning = start_planning(cluster, chosen)
    ended = "ended"
    try:
        _run_program(script, words)
    except PlanMade:
        pass
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        ended = f"ended with exit status {error.code}" if error.code else "ended"
    except BaseException as error:
        # What comes while the script ends is of no interest any more.
        if planning.plan is None:
            if isinstance(error, ParallaxError):
                raise
            raise _failed(error, cluster) from error
    finally:
        stop_planning()
    if planning.plan is None:
        raise _no_step(ended, planning)
    return planning


def _run_program(script: str, words: list[str]) -> None:
    """Runs a script or ``-m`` module as Python's own command line would, in this process."""
    before = sys.argv, sys.path[:]
    try:
        if script == "-m":
            sys.argv = words
            sys.path[0] = os.getcwd()
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [script, *words]
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _failed(error: BaseException, cluster: PlannedCluster) -> PlanError:
    """Shows where the script failed, as Python would have; the error."""
    shown = traceback.format_exception(type(error), error, _own_frames(error.__traceback__))
    sys.stderr.write("".join(shown))
    text = str(error).strip().splitlines()
    what = type(error).__name__ + (f": {text[0]}" if text else "")
    return PlanError(
        f"The script failed before its first step: {what}",
        hint="see that it runs by itself. For a plan it runs here up to its first runner.run(), as "
        f"worker 0 of {cluster.workers}, alone: what it needs before that, such as a device or "
        "another worker, has to be here.",
    )


def _own_frames(found: TracebackType | None) -> TracebackType | None:
    """The traceback from the script on: how it was started is no news."""
    while found is not None:
        name = found.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name and not name.startswith("<frozen"):
            return found
        found = found.tb_next
    return None


def _no_step(ended: str, planning: Planning) -> PlanError:
    if ended != "ended":
        return PlanError(
            f"The script {ended} before its first step.",
            hint="what it printed says why; its arguments are those that follow its name.",
        )
    if planning.runners == 0:
        return PlanError(
            "The script ended without a call of parallax.get_runner().",
            hint="a plan is made of the step that it is given: runner = "
            "parallax.get_runner(train_step), then runner.run(batch).",
        )
    return PlanError(
        "The script ended without a step: it never called run() of its runner.",
        hint="a plan is made of the first runner.run(batch). See that the arguments ask for a step "
        f"of training, and that the data has a batch for each of {planning.cluster.workers} "
        "workers.",
    )
