"""Which options of ssh a resource file may set.

A resource file may come from somebody else, and ssh has options that run local commands
(``ProxyCommand``, ``LocalCommand``, ``KnownHostsCommand``) or give up the check of host keys. What
needs those belongs into the user's own ``~/.ssh/config``, which ssh reads as always.
"""

from __future__ import annotations

import difflib
import re

__all__ = ["ALLOWED", "option_problem"]

ALLOWED = (
    "AddressFamily",
    "BindAddress",
    "BindInterface",
    "CertificateFile",
    "Ciphers",
    "Compression",
    "ConnectionAttempts",
    "ConnectTimeout",
    "GlobalKnownHostsFile",
    "HostKeyAlgorithms",
    "HostKeyAlias",
    "HostName",
    "IdentitiesOnly",
    "IPQoS",
    "KexAlgorithms",
    "LogLevel",
    "MACs",
    "ProxyJump",
    "PubkeyAcceptedAlgorithms",
    "ServerAliveCountMax",
    "ServerAliveInterval",
    "StrictHostKeyChecking",
    "TCPKeepAlive",
    "UserKnownHostsFile",
)
_VALUE = re.compile(r"[A-Za-z0-9_.,:@/+%*~\[\]=-]+")


def option_problem(text: str) -> str | None:
    """What is wrong with an option ``Name=value``, or None; the text completes 'options ...'."""
    name, equals, value = text.partition("=")
    known = {allowed.lower(): allowed for allowed in ALLOWED}
    if not equals:
        return f"must be of the form 'Name=value', found {text!r}"
    if name.strip().lower() not in known:
        near = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.7)
        guess = f" (did you mean {known[near[0]]!r}?)" if near else ""
        return f"has {name!r}{guess}; set it in your own ~/.ssh/config, which ssh reads"
    if not _VALUE.fullmatch(value.strip()) or value.strip().startswith("-"):
        return f"has the value {value!r} for {name}, which is not allowed here"
    strict = known[name.strip().lower()] == "StrictHostKeyChecking"
    if strict and value.strip().lower() not in ("yes", "ask", "accept-new"):
        return f"has StrictHostKeyChecking={value}: host keys are always checked"
    return None
