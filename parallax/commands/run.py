"""``parallax run``: a script on every worker of a resource file that the script does not name."""

from __future__ import annotations

import argparse
import os
import sys

from parallax.cluster.chief import Launch
from parallax.cluster.cluster_launch import execute, find_here
from parallax.cluster.code_files import program_files
from parallax.cluster.environment import refuse_nested_launch
from parallax.cluster.host_report import hash_files
from parallax.cluster.launch import launch_command, made_directory
from parallax.cluster.local_workers import local_host, pin_devices, workers_here
from parallax.cluster.resources import read_resources
from parallax.config import Config

__all__ = ["HELP", "add_arguments", "run"]

HELP = "run a script on every worker of the hosts in a resource file"
_EXAMPLE = "for example `parallax run hosts.yml -- train.py --epochs 3`."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.usage = "parallax run [options] FILE -- (train.py | -m module) [arguments]"
    parser.add_argument("file", metavar="FILE", help="the hosts: text or YAML")
    parser.add_argument("script", metavar="train.py", help="the script, or -m, after --")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.add_argument("--redirect-path", metavar="DIR", help="save each worker's output there")
    parser.add_argument("--seed", type=int, help="base of the workers' random numbers")


def run(arguments: argparse.Namespace) -> int:
    """Becomes the launcher; returns only when there is an error.

    Raises:
        ConfigError: the file or the script is wrong.
        LaunchError: a host cannot take part.
    """
    refuse_nested_launch()
    settings = Config(redirect_path=arguments.redirect_path, seed=arguments.seed)
    spec = read_resources(arguments.file)
    places = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    files = program_files(arguments.script, arguments.arguments, places, _EXAMPLE)
    redirect = None
    if settings.redirect_path is not None:
        redirect = made_directory(settings.redirect_path)
    here = find_here(spec)
    if len(spec.hosts) == 1:
        workers = workers_here(local_host(spec), settings.workers)
        pin_devices(spec.hosts[0])
        command = [sys.executable, arguments.script, *arguments.arguments]
        launch_command(command, None, workers, redirect_path=redirect, seed=settings.seed)
    execute(
        Launch(
            spec=spec,
            here=here,
            command=[arguments.script, *arguments.arguments],
            directory=os.getcwd(),
            code=hash_files(files),
            redirect=redirect,
            seed=settings.seed,
            default_workers=settings.workers,
        )
    )
