"""``parallax probe``: measures hosts and the network between them, as a resource file."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from parallax.cluster.chief import Launch, run_launch
from parallax.cluster.cluster_launch import find_here
from parallax.cluster.environment import refuse_nested_launch
from parallax.cluster.probed import ProbeFound, with_measured
from parallax.cluster.resource_yaml import to_yaml
from parallax.cluster.resources import read_resources
from parallax.cluster.spec import ClusterSpec, Host
from parallax.config import Config
from parallax.errors import ConfigError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure hosts and the network between them, and write it as a resource file"
_WORKER = "parallax.runtime.probe_hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "--resource-info", metavar="FILE", help="the hosts: text or YAML; this machine without"
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="write the YAML to this file, not to standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures the hosts; the exit status.

    Raises:
        ConfigError: the file is wrong, or OUT cannot be written.
        LaunchError: a host cannot take part.
    """
    refuse_nested_launch()
    spec = ClusterSpec((Host("localhost"),), source="this machine")
    if arguments.resource_info is not None:
        spec = read_resources(arguments.resource_info)
    here = find_here(spec)
    order = [here, *(at for at in range(len(spec.hosts)) if at != here)]
    names = [spec.hosts[at].address for at in order]
    with contextlib.ExitStack() as stack:
        # Before the measuring, which takes minutes on many hosts.
        draft = None if arguments.output is None else stack.enter_context(_draft(arguments.output))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parallax-")))
        result = place / "found"
        status = run_launch(
            Launch(
                spec=spec,
                here=here,
                command=["-m", _WORKER, str(result), msgspec.json.encode(names).decode()],
                directory=os.getcwd(),
                code={},
                default_workers=Config().workers,
            )
        )
        if status != 0:
            return status
        found = msgspec.json.decode(result.read_bytes(), type=ProbeFound)
        text = _yaml(with_measured(spec, order, found))
        if draft is None:
            sys.stdout.write(text)
        else:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, arguments.output)
            print(f"parallax: written to {arguments.output}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _draft(output: str) -> Iterator[Path]:
    """A file beside the output that takes its place when it is complete; else it is removed."""
    path = Path(output)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, os.strerror(21))
        number, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(number)
    except OSError as error:
        raise ConfigError(
            f"{output!r} cannot be written: {error.strerror}.",
            hint="name a file in a directory that you may write to, after -o.",
        ) from error
    try:
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _yaml(spec: ClusterSpec) -> str:
    return f"# Measured by parallax probe, {time.strftime('%Y-%m-%d')}.\n{to_yaml(spec)}"
