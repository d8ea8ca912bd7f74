"""``parallax check``: the checks that come before a run on several hosts, alone."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from parallax.cluster.chief import Launch, run_launch
from parallax.cluster.cluster_launch import refuse_missing_keys
from parallax.cluster.code_files import script_files
from parallax.cluster.host_report import hash_files
from parallax.cluster.local_workers import local_host
from parallax.cluster.resources import read_resources
from parallax.errors import ConfigError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "see whether every host of a resource file can be reached and runs the same"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "--resource-info", required=True, metavar="FILE", help="the hosts: text or YAML"
    )
    parser.add_argument("script", nargs="?", help="compare this script and what it imports, too")


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
        if not Path(arguments.script).is_file():
            raise ConfigError(f"The script {arguments.script!r} is no file.")
        places = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        code = hash_files(script_files(arguments.script, places))
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
