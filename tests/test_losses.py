"""The gradient of a cross entropy over many classes: the numbers of torch, in fewer passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_help import alone
from torch import nn

from parallax.graph.passes import losses
from parallax.ops import softmax

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, CLASSES = 12, 9


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LEAST", 1)


def trained(
    settings: dict[str, Any], labels: torch.Tensor, read_later: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """The model after a few steps, by torch and by parallax, and the operations of the graph."""
    torch.manual_seed(2)
    model = nn.Linear(5, CLASSES).double()
    batches = [torch.randn(ROWS, 5, dtype=torch.float64) for _ in range(3)]
    made = []
    for _ in range(2):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)

        def step(x: torch.Tensor, own: Any = own, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            logarithms = F.log_softmax(own(x), 1)
            loss = F.nll_loss(logarithms, labels, **settings)
            loss.sum().backward()
            optimizer.step()
            return (loss.sum(), logarithms.exp().sum()) if read_later else loss.sum()

        made.append((own, optimizer, step))
    for x in batches:
        made[0][2](x)
    runner = alone(made[1][2], model=made[1][0], optimizer=made[1][1])
    for x in batches:
        runner.run(x)
    operations = [str(node.target) for node in runner._last.step.graph.nodes]  # type: ignore[union-attr]
    return made[0][0].state_dict(), made[1][0].state_dict(), operations


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("read_later", [False, True])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_numbers_are_those_of_torch(reduction: str, ignored: str, read_later: bool) -> None:
    labels = torch.arange(ROWS) % CLASSES
    if ignored == "some":
        labels[::3] = -100
    elif ignored == "all":
        labels[:] = -100
    expected, found, operations = trained({"reduction": reduction}, labels, read_later)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    assert not any("_log_softmax_backward_data" in one for one in operations)
    # The logarithms that the step returns stay what they are.
    assert any("write_softmax" in one for one in operations) != read_later


@pytest.mark.usefixtures("of_any_size")
def test_weights_of_classes_are_left_to_torch() -> None:
    labels = torch.arange(ROWS) % CLASSES
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
    expected, found, operations = trained({"weight": weight}, labels, False)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    assert any("_log_softmax_backward_data" in one for one in operations)


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(
    "read", ["returned", "a view of them is", "read after", "read before", "changed after"]
)
def test_scores_that_are_read_later_stay_what_they_are(read: str) -> None:
    torch.manual_seed(2)
    model = nn.Linear(5, CLASSES).double()
    x, labels = torch.randn(ROWS, 5, dtype=torch.float64), torch.arange(ROWS) % CLASSES
    found = []
    for captured in (False, True):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)

        def step(x: torch.Tensor, own: Any = own, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            scores = own(x)
            best = scores.argmax(1) if read == "read before" else None
            loss = F.cross_entropy(scores, labels)
            if read == "changed after":
                scores.detach().zero_()
                best = loss
            loss.backward()
            optimizer.step()
            if best is None:
                best = {"returned": scores, "a view of them is": scores[0]}.get(read)
            return loss, scores.sum() if best is None else best

        runner = alone(step, model=own, optimizer=optimizer) if captured else None
        found.append([(runner.run if runner else step)(x) for _ in range(2)])
        if runner is not None:
            nodes = runner._last.step.graph.nodes  # type: ignore[union-attr]
            in_place = any("write_softmax" in str(node.target) for node in nodes)
            assert in_place == (read == "read before")
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 7, 20, 1 << 17])
def test_a_softmax_is_written_block_by_block(
    block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "BLOCK", block)
    torch.manual_seed(2)
    scores = torch.randn(ROWS, CLASSES, dtype=dtype) * 50
    classes = torch.randint(0, CLASSES, (ROWS,))
    classes[2] = -1
    expected = F.log_softmax(scores, 1)
    found = softmax.write_softmax(scores, classes, -1)
    chosen = classes.clamp(min=0).unsqueeze(1)
    torch.testing.assert_close(found, expected.gather(1, chosen))
    torch.testing.assert_close(scores, expected.exp())


@pytest.mark.parametrize("wrong", [CLASSES, -7])
def test_a_class_that_there_is_not_changes_nothing(wrong: int) -> None:
    scores = torch.randn(ROWS, CLASSES)
    before, classes = scores.clone(), torch.zeros(ROWS, dtype=torch.long)
    classes[5] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        softmax.write_softmax(scores, classes, -100)
    torch.testing.assert_close(scores, before, rtol=0, atol=0)


def test_few_classes_are_left_to_torch() -> None:
    _, _, operations = trained({}, torch.arange(ROWS) % CLASSES, False)
    assert any("_log_softmax_backward_data" in one for one in operations)


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_passes_as_in_torch(value: float) -> None:
    torch.manual_seed(2)
    model = nn.Linear(5, CLASSES).double()
    with torch.no_grad():
        model.bias[3] = value
    made = [copy.deepcopy(model) for _ in range(2)]
    x, labels = torch.randn(ROWS, 5, dtype=torch.float64), torch.arange(ROWS) % CLASSES
    for own in made:
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)

        def step(x: torch.Tensor, own: Any = own, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(own(x), labels)
            loss.backward()
            optimizer.step()
            return loss

        (step if own is made[0] else alone(step, model=own, optimizer=optimizer).run)(x)
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("criterion", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_means_over_an_empty_batch(criterion: Any) -> None:
    """A worker may have no rows: torch gives no number there, and so do we."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    assert alone(step).run(torch.zeros(0, 3), torch.zeros(0, 1)).isnan()
