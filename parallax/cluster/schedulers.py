"""Workers that Slurm or Kubernetes started: their variables in torchrun's words.

Slurm's ``srun`` starts every worker, and says who it is by SLURM_PROCID, SLURM_NTASKS and
SLURM_LOCALID; worker 0 is on the first host of SLURM_JOB_NODELIST. Kubernetes' training operators
set torchrun's own variables, but for one worker in each pod, and an indexed job numbers its pods by
JOB_COMPLETION_INDEX. What torchrun's names say already is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["first_host", "scheduled"]

# Steps that are no parallel programs: the batch script, a shell of salloc, the extern step.
_SPECIAL_STEPS = 4294967280
_PORTS = (20000, 20000)


def scheduled(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with torchrun's added where a scheduler's say the same.

    Args:
        variables: those of the process.
    """
    found = dict(variables)
    if "RANK" in found or "WORLD_SIZE" in found:
        if "KUBERNETES_SERVICE_HOST" in found:
            _add_kubernetes(found)
    elif _is_slurm_worker(found):
        _add_slurm(found)
    return found


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as ``gpu[003-010,12],login1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    text = first[0] if first is not None else nodes
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", text).strip()


def _add_kubernetes(variables: dict[str, str]) -> None:
    if "RANK" not in variables and "JOB_COMPLETION_INDEX" in variables:
        variables["RANK"] = variables["JOB_COMPLETION_INDEX"]
    local = {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(variables)
    address = variables.get("MASTER_ADDR", "")
    if local or address == "localhost" or address.startswith("127."):
        return
    variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"] = "0", "1"


def _is_slurm_worker(variables: Mapping[str, str]) -> bool:
    tasks = variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", ""))
    if "SLURM_PROCID" not in variables or tasks in ("", "1"):
        # A single task may start workers of its own.
        return False
    step = variables.get("SLURM_STEP_ID")
    if step is None:
        # The batch script has a SLURM_PROCID, too, but is no worker.
        return "SLURM_JOB_ID" not in variables
    return not (step.isdecimal() and int(step) >= _SPECIAL_STEPS)


def _add_slurm(variables: dict[str, str]) -> None:
    tasks = variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", ""))
    variables["RANK"] = variables["SLURM_PROCID"]
    variables["WORLD_SIZE"] = tasks
    if "SLURM_LOCALID" in variables:
        variables.setdefault("LOCAL_RANK", variables["SLURM_LOCALID"])
    here = _tasks_here(variables)
    if here is not None:
        variables.setdefault("LOCAL_WORLD_SIZE", here)
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    if nodes:
        variables.setdefault("MASTER_ADDR", first_host(nodes))
    variables.setdefault("MASTER_PORT", _port(variables))


def _tasks_here(variables: Mapping[str, str]) -> str | None:
    """Number of tasks on this node: of a list such as ``4(x2),3``, the entry of SLURM_NODEID."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    counts: list[str] = []
    for entry in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", entry.strip())
        if found is None:
            return variables.get("SLURM_NTASKS_PER_NODE")
        counts += [found[1]] * int(found[2] or 1)
    node = variables.get("SLURM_NODEID", "")
    if node.isdecimal() and len(node) < 9 and int(node) < len(counts):
        return counts[int(node)]
    return counts[0] if len(set(counts)) == 1 else None


def _port(variables: Mapping[str, str]) -> str:
    """A port that all tasks of a step agree on without talking to each other."""
    reserved = re.match(r"[0-9]+", variables.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None:
        return reserved[0]
    numbers = re.findall(
        r"[0-9]+", variables.get("SLURM_JOB_ID", "") + " " + variables.get("SLURM_STEP_ID", "")
    )
    mixed = sum(int(number) * factor for number, factor in zip(numbers, (1, 7919), strict=False))
    return str(_PORTS[0] + mixed % _PORTS[1])
