"""Resource files: the machines of a run, as the user writes them down.

Two forms are read into a :class:`ClusterSpec`: the text of the Parallax user guide, one host a line
(``resource_text.py``), and YAML, which says more (``resource_yaml.py``).
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from parallax.cluster.resource_problems import Problems
from parallax.cluster.spec import ClusterSpec
from parallax.errors import ConfigError

__all__ = ["MAX_BYTES", "read_resources"]

MAX_BYTES = 1 << 20
EXAMPLE = "for example 'localhost: 0,1', or one host a line: '10.0.0.4: 0,1,2'."


def read_resources(path: str | os.PathLike[str]) -> ClusterSpec:
    """Reads and checks a resource file.

    Args:
        path: a file in the guide's text form, or YAML if its name ends in ``.yml`` or ``.yaml`` or
            it has a line that begins with ``hosts:``.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; every problem is named
            with file and line.
    """
    text = _text(Path(path))
    problems = Problems(str(path))
    if Path(path).suffix in (".yml", ".yaml") or re.search(r"^hosts[ \t]*:", text, re.MULTILINE):
        from parallax.cluster.resource_yaml import read_yaml

        hosts, links = read_yaml(text, problems)
    else:
        from parallax.cluster.resource_text import read_text

        hosts, links = read_text(text, problems), ()
    if not hosts and not problems.found:
        raise ConfigError(f"resource_info {str(path)!r} lists no hosts.", hint=EXAMPLE)
    problems.check_hosts(hosts)
    problems.report()
    return ClusterSpec(hosts, links, str(path))


def _text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"resource_info {str(path)!r} is no file: {error.strerror}.",
            hint="write a file with one line such as 'localhost: 0,1', or pass None.",
        ) from error
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"resource_info {str(path)!r} is no file.",
            hint="write a file with one line such as 'localhost: 0,1', or pass None.",
        )
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"resource_info {str(path)!r} is larger than {MAX_BYTES} bytes.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        what = "is no UTF-8 text" if isinstance(error, ValueError) else "cannot be read"
        raise ConfigError(f"resource_info {str(path)!r} {what}: {error}.") from error
    if "\0" in text:
        raise ConfigError(
            f"resource_info {str(path)!r} is no text: byte {text.index(chr(0))} is zero."
        )
    return text
