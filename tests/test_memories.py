"""What a step puts into objects, containers and names is there after it, and for the next one."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import user_memories
from errors_help import alone, among, linear, raised, rows, warnings_of_parallax
from pool import Pool
from torch import nn

from parallax.errors import CheckpointError
from parallax.runtime.comm.world import World


class Trainer:
    """An object in whose attributes a step leaves what people look at afterwards."""

    def __init__(self) -> None:
        self.model, self.optimizer = linear()
        self.outputs: Any = None
        self.losses: dict[str, Any] = {}
        self.history: list[Any] = []
        self.hidden: Any = None

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        self.outputs = self.model(x)
        loss = self.outputs.square().mean()
        self.losses["mean"] = loss
        self.parts = {"all": [self.outputs[0], self.outputs[1]], "names": ("a", 3)}
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def remembering(self, x: torch.Tensor) -> torch.Tensor:
        """With states in a tuple."""
        old = (torch.zeros(x.shape[0], 2),) if self.hidden is None else self.hidden
        outputs = torch.tanh(self.model(x) + old[0])
        loss = outputs.square().mean()
        self.hidden = (outputs.detach(),)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def test_attributes_have_what_the_step_left_in_them() -> None:
    trainer, one_device = Trainer(), Trainer()
    runner = alone(trainer.step)
    with warnings_of_parallax() as said:
        for count in (4, 5, 6):
            runner.run(rows(count))
            one_device.step(rows(count))
            torch.testing.assert_close(trainer.outputs, one_device.outputs.detach())
            assert torch.equal(trainer.x, rows(count))
            torch.testing.assert_close(trainer.losses["mean"], one_device.losses["mean"].detach())
            torch.testing.assert_close(trainer.parts["all"], [*trainer.outputs[:2]])
            assert trainer.parts["names"] == ("a", 3)
    assert not said
    assert runner._preparation.captures.count == 3  # the last one is for any number of rows
    assert set(runner.state_dict()) == {"model", "optimizer"}  # the step reads none of it


def test_a_tensor_that_is_bound_anew_needs_no_further_captures() -> None:
    model, optimizer = linear()
    kept = SimpleNamespace(last=torch.zeros(4, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) + kept.last).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.last = loss.detach().expand(4, 2)
        return loss

    runner = alone(step)
    for _ in range(4):
        runner.run(rows(4))
    assert runner._preparation.captures.count == 1


def test_a_memory_of_another_shape_is_another_graph() -> None:
    model, optimizer = linear()
    kept = {"queue": torch.zeros(0, 2)}

    def step(x: torch.Tensor) -> torch.Tensor:
        outputs = model(x)
        loss = outputs.square().mean() + kept["queue"].sum()
        kept["queue"] = torch.cat([kept["queue"], outputs.detach()])[-6:]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    sizes = []
    for _ in range(5):
        runner.run(rows(4))
        sizes.append(len(kept["queue"]))
    assert sizes == [4, 6, 6, 6, 6]
    assert runner._preparation.captures.count == 3
    kept["queue"] = torch.zeros(4, 2)
    runner.run(rows(4))
    assert runner._preparation.captures.count == 3


def test_states_that_are_put_back_to_none_begin_anew() -> None:
    trainer, one_device = Trainer(), Trainer()
    runner = alone(trainer.remembering)
    with warnings_of_parallax() as said:
        for number in range(7):
            if number in (3, 5):
                trainer.hidden = one_device.hidden = None
            found = runner.run(rows(4))
            torch.testing.assert_close(found, one_device.remembering(rows(4)).detach())
    assert not said
    assert isinstance(trainer.hidden, tuple)
    assert runner._preparation.captures.count == 2


def test_items_that_are_appended_to_a_list_that_the_step_reads_are_undone_with_a_warning() -> None:
    trainer = Trainer()
    trainer.history.append(torch.zeros(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = trainer.step(x)
        trainer.history.append(loss.detach() / len(trainer.history))
        return loss

    runner = alone(step)
    with warnings_of_parallax() as said:
        for _ in range(3):
            runner.run(rows(4))
    assert len(trainer.history) == 1
    assert len(said) == 1
    assert "is undone: history" in said[0]


def test_a_name_may_lose_its_container() -> None:
    model, optimizer = linear()
    kept: Any = {"shift": torch.zeros(2)}

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        loss = (model(x) + kept["shift"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = None
        return loss

    with warnings_of_parallax() as said:
        alone(step).run(rows(4))
    assert kept is None
    assert not said


def test_a_view_of_a_parameter_is_no_state() -> None:
    model, optimizer = linear()
    kept = SimpleNamespace(weight=None, both=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.weight = model.weight.detach()
        kept.both = (model.weight, model.weight.t())
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    with warnings_of_parallax() as said:
        runner.run(rows(4))
    assert (kept.weight, kept.both) == (None, None)
    assert len(said) == 1
    assert "kept.weight" in said[0]
    assert "kept.both" in said[0]


def test_parameters_beside_states_stay_what_they_are() -> None:
    model, optimizer = linear()
    kept = SimpleNamespace(pair=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        outputs = model(x)
        kept.pair = [model.bias, outputs, model]
        loss = outputs.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    for _ in range(2):
        runner.run(rows(4))
        assert kept.pair[0] is model.bias
        assert kept.pair[1].shape == (4, 2)
        assert kept.pair[2] is model


def test_a_dict_that_is_there_stays_the_same_object() -> None:
    trainer = Trainer()
    losses = trainer.losses
    runner = alone(trainer.step)
    for _ in range(2):
        runner.run(rows(4))
        assert trainer.losses is losses
    assert list(losses) == ["mean"]


@pytest.mark.parametrize("name", ["attribute", "list", "module", "entry"])
def test_a_run_goes_on_from_a_saved_state(name: str) -> None:
    def made() -> tuple[list[nn.Module], Any, list[Any]]:
        torch.manual_seed(2)
        return user_memories._training(3, *user_memories.PLACES[name])

    (_, step, batches), (_, other, _) = made(), made()
    runner, second = alone(step), alone(other)
    for batch in batches[:2]:
        runner.run(*batch)
    saved = copy.deepcopy(runner.state_dict())
    assert any("hidden" in key or "inner" in key for key in saved)
    second.load_state_dict(saved)
    for batch in batches[2:]:
        assert torch.equal(second.run(*batch), runner.run(*batch))
    second.load_state_dict(saved)  # while it has states of its own
    runner.load_state_dict(saved)
    for batch in batches[2:]:
        assert torch.equal(second.run(*batch), runner.run(*batch))
    for found, wanted in zip(_tensors(second), _tensors(runner), strict=True):
        assert torch.equal(found, wanted)


def test_running_losses_that_began_as_numbers_go_on_from_a_saved_state() -> None:
    class Meter:
        total: Any = 0.0

        def add(self, loss: torch.Tensor) -> None:
            self.total = self.total + loss

    class Trainer:
        def __init__(self) -> None:
            torch.manual_seed(2)
            self.model = nn.Linear(3, 2)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            self.loss: Any = 0.0
            self.meters = [Meter()]

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.loss += loss.detach()
            self.meters[0].add(loss.detach())
            return loss

    first, second = Trainer(), Trainer()
    runner, other = alone(first.step), alone(second.step)
    for _ in range(2):
        runner.run(rows(4))
    other.load_state_dict(copy.deepcopy(runner.state_dict()))
    for one in (runner, other):
        one.run(rows(4))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.loss, first.meters[0].total)
    assert torch.equal(first.loss, second.meters[0].total)


def _gradients_differ(world: World) -> bool:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        return model.weight.grad, [model.bias.grad[1:]]

    runner = among(world, step)
    found = [runner.run(rows(4)) for _ in range(2)]
    return all(not torch.equal(one, other) for one, other in zip(*map(_flat, found), strict=True))


def _flat(item: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(item)


def test_gradients_that_are_returned_stay(pool: Pool) -> None:
    assert pool.run(2, _gradients_differ) == [True, True]


def _tensors(runner: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(runner.state_dict())
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_what_is_in_no_place_is_unexpected() -> None:
    trainer = Trainer()
    runner = alone(trainer.remembering)
    runner.run(rows(4))
    saved = runner.state_dict()
    assert [key for key in saved if "hidden" in key] == ["self.hidden"]
    odd = {**saved, "epoch": torch.zeros(1), "self.a.b": torch.zeros(1)}
    raised(
        lambda: runner.load_state_dict(odd),
        CheckpointError,
        "unexpected 'epoch'; unexpected 'self.a.b'",
    )
    runner.run(rows(4))  # which reads it
    del saved["self.hidden"]
    raised(lambda: runner.load_state_dict(saved), CheckpointError, "missing 'self.hidden'")
