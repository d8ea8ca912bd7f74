"""How the agent of a host is started: by the system's ssh, or directly on this machine.

ssh reads the user's configuration, keys, agent and known hosts as always. Its command line has
nothing in it that comes from the script: the interpreter's path, checked and quoted, and a program
of fixed text that reads the rest from its standard input.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from parallax.cluster.spec import Host
from parallax.cluster.wire import MAGIC

__all__ = ["agent_command", "explain_end", "ssh_command"]

CONNECT_SECONDS = 10
# The user's own setting for the host comes before these, so it wins.
_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_SECONDS}",
    "ServerAliveInterval=3",
    "ServerAliveCountMax=3",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
    "ControlPath=none",
    "RemoteCommand=none",
)
# One line without single quotes, exclamation marks and line ends: sh, csh and fish read it alike.
# It must run on any Python 3 and tell what is missing, so it needs the standard library only.
_PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import os, json; exec("
    '"def read(n):\\n'
    "  b = bytes()\\n"
    "  while len(b) < n:\\n"
    "    c = os.read(0, n - len(b))\\n"
    "    if not c: os._exit(3)\\n"
    "    b += c\\n"
    "  return b\\n"
    "def fail(text, hint):\\n"
    '  b = json.dumps(dict(type=\\"Trouble\\", problem=text, hint=hint)).encode()\\n'
    '  os.write(1, magic + len(b).to_bytes(4, \\"big\\") + b)\\n'
    "  os._exit(3)\\n"
    "magic = read(MAGIC_LENGTH)\\n"
    'data = read(int.from_bytes(read(4), \\"big\\"))\\n'
    "order = json.loads(data.decode())\\n"
    'version = \\".\\".join(map(str, sys.version_info[:3]))\\n'
    "if sys.version_info < (3, 10):\\n"
    '  fail(\\"its Python \\" + str(sys.executable) + \\" is \\" + version, '
    '\\"parallax needs Python 3.10; set ssh: python to another interpreter.\\")\\n'
    "have = set(sys.path)\\n"
    'sys.path[:0] = [p for p in order[\\"paths\\"][:-1] if p not in have]\\n'
    'sys.path += order[\\"paths\\"][-1:]\\n'
    "try:\\n"
    "  from parallax.cluster.host_agent import main\\n"
    "except Exception as error:\\n"
    '  fail(\\"its Python \\" + str(sys.executable) + \\" (\\" + version + \\") cannot import '
    'parallax: \\" + str(error), \\"run there: \\" + str(sys.executable) + \\" -m pip install '
    'parallax, with the same versions as here, or set ssh: python to another interpreter.\\")\\n'
    'main(data)\\n"'
    ")"
).replace("MAGIC_LENGTH", str(len(MAGIC)))


def agent_command(python: str) -> list[str]:
    """The command that runs a host's agent with an interpreter of that host."""
    return [python, "-c", _PROGRAM]


def ssh_command(host: Host, python: str) -> list[str]:
    """The command that runs the agent on another host.

    Args:
        host: with a checked address.
        python: the interpreter there.
    """
    command = ["ssh", "-T"]
    for option in (*host.ssh.options, *_OPTIONS):
        command += ["-o", option]
    if host.ssh.user is not None:
        command += ["-l", host.ssh.user]
    if host.ssh.port is not None:
        command += ["-p", str(host.ssh.port)]
    if host.ssh.key is not None:
        command += ["-i", os.path.expanduser(host.ssh.key)]
    remote = "exec " + shlex.join(agent_command(python))
    return [*command, "--", host.address, remote]


def explain_end(host: Host, python: str, status: int, said: str) -> tuple[str, str]:
    """Why ssh ended before the agent spoke: the problem and the way out.

    ssh tells its own failures (status 255) apart in words only.

    Args:
        host: that it went to.
        python: the interpreter that was asked for there.
        status: ssh's exit status.
        said: its standard error.
    """
    target = host.address
    attempt = shlex.join(["ssh", *_target_words(host), "true"])
    last = [line for line in said.splitlines() if line.strip()][-1:] or ["ssh said nothing"]
    if status in (126, 127):
        return (
            f"{target} has no Python at {python}",
            f"install it there, or set `ssh: python`; what {target} said: {last[0].strip()}",
        )
    for pattern, problem, hint in _CAUSES:
        if re.search(pattern, said, re.IGNORECASE):
            words = {"attempt": attempt, "host": target, "user": host.ssh.user or "your account"}
            return problem.format(**words), hint.format(**words)
    if status == 255:
        return f"ssh to {target} failed: {last[0].strip()}", f"try `{attempt}`."
    how = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
    return (
        f"the agent on {target} {how} before it spoke: {last[0].strip()}",
        f"try `{attempt}`, and {python} there.",
    )


def _target_words(host: Host) -> list[str]:
    words = [] if host.ssh.port is None else ["-p", str(host.ssh.port)]
    if host.ssh.key is not None:
        words += ["-i", host.ssh.key]
    return [*words, host.address if host.ssh.user is None else f"{host.ssh.user}@{host.address}"]


_CAUSES = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host key of {host} has changed: another machine answers, or it was installed anew",
        "if that was to be expected, remove the old key with `ssh-keygen -R {host}` and accept the"
        " new one with `{attempt}`; never continue otherwise.",
    ),
    (
        r"Host key verification failed|host key is known|authenticity of host",
        "the host key of {host} is not known to this machine",
        "compare and accept it once with `{attempt}`.",
    ),
    (
        r"UNPROTECTED PRIVATE KEY|bad permissions",
        "the private key for {host} can be read by others, so ssh does not use it",
        "chmod 600 it; then try `{attempt}`.",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "{host} denied permission to {user}",
        "see that a key is accepted without a question: `{attempt}` (ssh-copy-id, ssh-agent, or"
        " `ssh: {{user: ..., key: ...}}`).",
    ),
    (
        r"Could not resolve hostname|Name or service not known",
        "the name {host} does not resolve",
        "write its address, or add the name to /etc/hosts or ~/.ssh/config.",
    ),
    (
        r"Connection refused",
        "{host} refused the connection: no sshd listens on its port",
        "start sshd there, or set `ssh: {{port: ...}}`.",
    ),
    (
        r"No route to host|Network is unreachable|Host is down",
        "{host} is unreachable: there is no route to it, or it is down",
        "see that it runs and that `{attempt}` works.",
    ),
    (
        r"timed out|not responding|banner exchange",
        "{host} did not answer in time: it is down, or a firewall drops what is sent to it",
        "see that it runs and that `{attempt}` works.",
    ),
    (
        r"Connection (closed|reset)",
        "{host} closed the connection before it let us in",
        "see its sshd's log; try `{attempt}`.",
    ),
)


def package_parent() -> str:
    """The directory that holds this package."""
    return str(Path(__file__).resolve().parents[2])


def default_python() -> str:
    """The interpreter that hosts use if the resource file says nothing: this one's path."""
    return sys.executable
