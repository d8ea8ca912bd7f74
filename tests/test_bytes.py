"""Invariant 4: bytes are accounted for. Formula, the runtime's count and the network agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import traffic
from pool import Pool

from parallax.config import RUN_OPTIONS


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sparse_gradients", [False, True])
@pytest.mark.parametrize("option", RUN_OPTIONS)
def test_sent_bytes_equal_the_formula(
    pool: Pool, option: str, sparse_gradients: bool, size: int
) -> None:
    found = pool.run(size, traffic.counted, option, sparse_gradients)
    sent = sum(item["sent"] for item in found) / size
    formula = sum(item["formula"] for item in found) / size
    assert formula > 0
    assert sent == pytest.approx(formula, rel=0.05)


def test_formulas_are_table_3_of_the_paper(pool: Pool) -> None:
    """Gradients and rows alone, without ids: 2(N-1)/N b for dense, 2αb(N-1)/N or (N-1)αb."""
    dense = 4 * (traffic.WIDTH * 600 + 600 + 600 * 600 + 600 + 600 + 1)
    for option, size in (("HYBRID", 4), ("AR", 3)):
        found = pool.run(size, traffic.counted, option, False)[0]
        alpha_rows = found["rows" if option == "HYBRID" else "allgather"]
        ids = 4 if option == "HYBRID" else 8
        per_row = traffic.WIDTH * 4
        factor = (size - 1) / size if option == "HYBRID" else size - 1
        touched = alpha_rows / (factor * ((2 if option == "HYBRID" else 1) * per_row + ids))
        assert 300 < touched < traffic.BATCH  # duplicates are sent once
        assert found["formula"] == pytest.approx(2 * (size - 1) / size * dense + alpha_rows)


@pytest.mark.long
def test_counted_bytes_are_on_the_wire(tmp_path: Path) -> None:
    """In a network namespace of its own, the loopback device carries what the runtime counts, and
    nothing of what workers of one host share."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("needs the right to make a network namespace")
    script = tmp_path / "wire.py"
    here = Path(__file__).parent
    script.write_text(
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "import traffic\n"
        "from pool import Pool\n"
        "if __name__ == '__main__':\n"
        "    pool = Pool()\n"
        "    for size, option in ((2, 'HYBRID'), (2, 'PS'), (2, 'AR'), (3, 'AR'), (3, 'HYBRID')):\n"
        "        found = pool.run(size, traffic.on_the_wire, option)\n"
        "        seen = max(item['seen'] for item in found)\n"
        "        print('=', size, option, seen, sum(item['sent'] for item in found),\n"
        "              sum(item['shared'] for item in found))\n"
        "    pool.close()\n"
    )
    command = f"ip link set lo up && {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("=")]
    assert len(lines) == 5, done.stdout
    for size, option, *numbers in lines:
        seen, sent, shared = map(float, numbers)
        if size == "2":  # Each on a host of its own, as far as they know.
            assert seen == pytest.approx(sent, rel=0.05), (option, seen, sent)
            assert shared == 0
        else:
            assert shared > 1e6
            assert seen < 1e5 + 1.05 * sent, (option, seen, sent)
