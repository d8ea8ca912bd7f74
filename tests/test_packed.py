"""What a captured step makes of packed sequences beside the numbers that user_packed compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_help import alone, raised
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

from parallax.errors import BatchError, UnsupportedError

Loss = Callable[[nn.Module, nn.Module, Any], torch.Tensor]


def _made(loss: Loss) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    torch.manual_seed(5)
    layer = nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5).double()
    scores = nn.Linear(3, 2).double()
    model = nn.ModuleList([layer, scores])
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(*batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(layer, scores, batch)
        value.backward()
        optimizer.step()
        return value

    return model, step


def _at_the_end(layer: nn.Module, scores: nn.Module, batch: Any) -> torch.Tensor:
    packed = pack_padded_sequence(batch[0], batch[1], True, enforce_sorted=False)  # packs
    return scores(layer(packed)[1][0][-1]).square().mean()


def _summed(layer: nn.Module, scores: nn.Module, batch: Any) -> torch.Tensor:
    packed = pack_padded_sequence(batch[0], batch[1], True, enforce_sorted=False)
    outputs, _ = pad_packed_sequence(layer(packed)[0], True)  # pads
    return scores(outputs.sum(1)).square().mean()


def _packed_before(layer: nn.Module, scores: nn.Module, batch: Any) -> torch.Tensor:
    packed = layer(batch[0])[0]  # packed before
    outputs, _ = pad_packed_sequence(packed, True, padding_value=0.5, total_length=9)
    return scores(outputs.mean(1)).square().mean()


def _x(steps: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, steps, 4, dtype=torch.float64)


def _captures(loss: Loss, batches: list[tuple[Any, ...]]) -> int:
    """How often a step is captured that gives the losses of eager steps, dropout included."""
    _, step = _made(loss)
    torch.manual_seed(6)
    expected = [step(*batch) for batch in batches]
    _, step = _made(loss)
    runner = alone(step)
    torch.manual_seed(6)
    found = [runner.run(*batch) for batch in batches]
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-12)
    return runner._preparation.captures.count


def test_one_graph_holds_for_all_lengths() -> None:
    batches = [(_x(5), torch.tensor(lengths)) for lengths in ([5, 3, 2], [1, 4, 3], [2, 5, 1])]
    # Adam's first step, which makes its slots, is another program than those after it.
    assert _captures(_at_the_end, batches) == 2
    assert _captures(_summed, [batches[0], batches[2], batches[2]]) == 2


def test_sequences_that_were_packed_before_the_step() -> None:
    def packed(*lengths: int) -> tuple[PackedSequence]:
        return (pack_sequence([_x(length, 1)[0] for length in lengths], enforce_sorted=False),)

    batches = [packed(4, 2, 5), packed(3, 3, 1), packed(7, 1, 2, 4), packed(2, 6)]
    assert _captures(_packed_before, batches) <= 3


def test_single_sequences_and_steps() -> None:
    batches = [(_x(4, 1), torch.tensor([3])), (_x(1), torch.tensor([1, 1, 1]))]
    _captures(_at_the_end, [*batches, (_x(4), torch.tensor([4, 1, 2]))])


@pytest.mark.parametrize("lengths", [[5, 0, 2], [5, 6, 2]])
def test_lengths_that_cannot_be(lengths: list[int]) -> None:
    runner = alone(_made(_at_the_end)[1])
    runner.run(_x(5), torch.tensor([5, 3, 2]))
    error = raised(
        lambda: runner.run(_x(5), torch.tensor(lengths)),
        BatchError,
        f"lengths from {min(lengths)} to {max(lengths)}",
        "between 1 and 5",
    )
    assert "# packs" in str(error)


def test_steps_that_nobody_reaches_are_not_left_in_silence() -> None:
    runner = alone(_made(_summed)[1])
    error = raised(
        lambda: runner.run(_x(5), torch.tensor([4, 3, 2])),
        BatchError,
        "longest sequence of this worker's batch has 4 of 5 steps",
        "total_length=x.shape[1]",
    )
    assert "# pads" in str(error)


def test_a_packed_batch_must_tell_its_number_of_sequences() -> None:
    runner = alone(_made(_packed_before)[1])
    error = raised(
        lambda: runner.run(pack_sequence([_x(4, 1)[0], _x(2, 1)[0]])),
        UnsupportedError,
        "does not say how many sequences",
        "enforce_sorted=False",
    )
    assert "# packed before" in str(error)


def test_torch_is_as_it_was() -> None:
    before = nn.LSTM.forward, torch._VF._pack_padded_sequence
    alone(_made(_at_the_end)[1]).run(_x(5), torch.tensor([5, 3, 2]))
    assert before == (nn.LSTM.forward, torch._VF._pack_padded_sequence)
