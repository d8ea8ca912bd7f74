"""What the launcher and the agent of a host say to each other, over ssh's standard streams.

The launcher begins with MAGIC and its :class:`Order`, the agent with MAGIC; login shells print
things, so whatever the other side sends before MAGIC is noise. After it come frames: four bytes of
length, most significant first, and one message as JSON. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio

import msgspec

__all__ = [
    "BEAT_SECONDS",
    "LEASE_SECONDS",
    "MAGIC",
    "Beat",
    "Ended",
    "Finish",
    "FromAgent",
    "FromLauncher",
    "Open",
    "Opened",
    "Order",
    "Output",
    "Report",
    "Start",
    "Stop",
    "Trouble",
    "WireError",
    "decode_from_agent",
    "decode_from_launcher",
    "frame",
    "read_frame",
]

MAGIC = b"\nPARALLAX-AGENT-1\n"
MAX_FRAME = 64 << 20
# Both ends say something every second; who hears nothing for the lease takes the other for gone.
BEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0


class WireError(Exception):
    """The other side does not speak as it should."""


class Order(msgspec.Struct, frozen=True):
    """What a host is to run, and what has to be the same there.

    Args:
        host: the host as the resource file names it.
        run_id: of this launch, in the keys of its store.
        paths: directories of PYTHONPATH, then the one that holds parallax.
        directory: where to start the workers.
        command: what follows the interpreter on the workers' command line.
        environment: variables for the workers.
        devices: CUDA devices to use; None for all, unless ``cpus`` is given.
        cpus: number of workers on the CPU.
        default_workers: number of workers where neither is given and no device is found.
        code: SHA-256 of each file of the user's code, by path.
        beat, lease: seconds.
    """

    host: str
    run_id: str
    paths: list[str]
    directory: str
    command: list[str]
    environment: dict[str, str]
    devices: list[int] | None
    cpus: int | None
    default_workers: int
    code: dict[str, str]
    beat: float = BEAT_SECONDS
    lease: float = LEASE_SECONDS


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """To the chief's agent: open the store's port on this address."""

    address: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start the workers.

    Args:
        node: this host's number.
        nodes: number of hosts.
        first_rank: number of this host's first worker.
        address, port: of the store, on the chief's host.
        seed: base of the workers' random numbers.
    """

    node: int
    nodes: int
    first_rank: int
    address: str
    port: int
    seed: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Pass this signal on to the workers; the second time, end them at once."""

    signal: int


class Finish(msgspec.Struct, frozen=True, tag=True):
    """All hosts have ended: the store is no longer needed."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """What a host is and has.

    Args:
        machine: the same text from two hosts means that they are one machine.
        python, torch, parallax: versions; torch's is empty if it is not installed.
        package: SHA-256 of parallax's own code there.
        executable: the interpreter.
        workers: how many it would run.
        devices: number of CUDA devices that it has.
        cores: that the agent may use.
        free_memory: bytes.
        code: SHA-256 of each file in the order; empty for a file that cannot be read.
        problems: why it cannot run the order, each a sentence with its way out.
        peer: the launcher's address as sshd of this host sees it, if there is one.
    """

    machine: str
    python: str
    torch: str
    parallax: str
    package: str
    executable: str
    workers: int
    devices: int
    cores: int
    free_memory: int
    code: dict[str, str]
    problems: list[tuple[str, str]]
    peer: str = ""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The store's port."""

    port: int


class Output(msgspec.Struct, frozen=True, tag=True):
    """Bytes that a worker wrote.

    Args:
        rank: the worker; -1 for the agent itself.
        error: whether to standard error.
        data: the bytes.
    """

    rank: int
    error: bool
    data: bytes


class WorkerEnded(msgspec.Struct, frozen=True):
    """How a worker ended: see ``worker_watch.WorkerEnd``."""

    rank: int
    status: int
    stopped: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All workers of the host have ended.

    Args:
        status: the exit status of torchrun's agent.
        ends: how workers ended, in the order of time, as far as seen.
        signal: that stopped the agent, or 0.
        problem: why workers could not be started, if so.
    """

    status: int
    ends: list[WorkerEnded]
    signal: int = 0
    problem: str = ""


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """The agent cannot do what it was told; it ends."""

    problem: str
    hint: str = ""


FromLauncher = Beat | Open | Start | Stop | Finish
FromAgent = Beat | Report | Opened | Output | Ended | Trouble

_encoder = msgspec.json.Encoder()
_launcher_decoder = msgspec.json.Decoder(FromLauncher)
_agent_decoder = msgspec.json.Decoder(FromAgent)


def frame(message: FromLauncher | FromAgent | Order) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's bytes, or None at the end of the stream.

    Raises:
        WireError: its length is out of all proportion: this is no frame.
    """
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > MAX_FRAME:
            raise WireError(f"a message of {size} bytes")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def decode_from_launcher(data: bytes) -> FromLauncher:
    """The launcher's message.

    Raises:
        WireError: it is none.
    """
    try:
        message: FromLauncher = _launcher_decoder.decode(data)
        return message
    except msgspec.DecodeError as error:
        raise WireError(str(error)) from error


def decode_from_agent(data: bytes) -> FromAgent:
    """The agent's message.

    Raises:
        WireError: it is none.
    """
    try:
        message: FromAgent = _agent_decoder.decode(data)
        return message
    except msgspec.DecodeError as error:
        raise WireError(str(error)) from error
