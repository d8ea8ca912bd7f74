"""``parallax check``: the checks that come before a run on several hosts, alone."""

from __future__ import annotations

import argparse
import os

from parallax.cluster.chief import Launch, run_launch
from parallax.cluster.cluster_launch import refuse_missing_keys
from parallax.cluster.code_files import program_files
from parallax.cluster.host_report import hash_files
from parallax.cluster.local_workers import local_host
from parallax.cluster.resources import read_resources

__all__ = ["HELP", "add_arguments", "run"]

HELP = "see whether every host of a resource file can be reached and runs the same"
_EXAMPLE = "for example `parallax check --resource-info hosts.yml -- -m package.train`."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "--resource-info", required=True, metavar="FILE", help="the hosts: text or YAML"
    )
    parser.usage = "parallax check [options] [-- (train.py | -m module) [arguments]]"
    parser.add_argument(
        "script", nargs="?", metavar="train.py", help="compare it and what it imports, too"
    )
    parser.add_argument("arguments", nargs="*", help="of the script; not used")


def run(arguments: argparse.Namespace) -> int:
    """Checks the hosts; the exit status.

    Raises:
        ConfigError: the file or the script is wrong.
        LaunchError: a host cannot take part.
    """
    spec = read_resources(arguments.resource_info)
    refuse_missing_keys(spec)
    code: dict[str, str] = {}
    if arguments.script is not None:
        places = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        files = program_files(arguments.script, arguments.arguments, places, _EXAMPLE)
        code = hash_files(files)
    host = local_host(spec)
    return run_launch(
        Launch(
            spec=spec,
            here=None if host is None else spec.hosts.index(host),
            command=[],
            directory=os.getcwd(),
            code=code,
            check_only=True,
        )
    )
