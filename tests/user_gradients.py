"""Steps of several losses and optimizers, as people write them: see user_steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import CASES, STEPS, Built, case, classes, mlp, numbers

# -- Two models that train each other -------------------------------------------------------


def _adversaries(rows: int, variant: str) -> Built:
    """A GAN whose discriminator has a table: the generator's backward pass leaves it gradients."""
    generator, critic, table = mlp(3, 4), mlp(8, 1), nn.Embedding(20, 4).double()
    judging = nn.ModuleList([table, critic])
    of_generator = torch.optim.Adam(generator.parameters(), 1e-2)
    of_critic = torch.optim.Adam(judging.parameters(), 1e-2)

    def score(x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return critic(torch.cat([x, table(kinds)], 1)).mean()

    def step(real: torch.Tensor, noise: torch.Tensor, kinds: torch.Tensor) -> Any:
        of_critic.zero_grad()
        if variant == "frozen":
            judging.requires_grad_(True)
        fake = generator(noise)
        loss = score(fake.detach(), kinds) - score(real, kinds)
        loss.backward()
        if variant in ("clipped", "both"):
            nn.utils.clip_grad_norm_(judging.parameters(), 0.1)
        of_critic.step()
        with torch.no_grad():
            for parameter in judging.parameters():
                parameter.clamp_(-0.5, 0.5)
        if variant == "zeroed":
            of_critic.zero_grad(set_to_none=False)
        if variant == "frozen":
            judging.requires_grad_(False)
        of_generator.zero_grad()
        cheating = -score(fake, kinds)
        cheating.backward()
        of_generator.step()
        if variant in ("zeroed", "both", "again"):
            of_critic.step()
        norms = [p.grad.norm() for p in judging.parameters() if p.grad is not None]
        return loss, cheating, torch.stack(norms) if variant == "norms" else None

    batches = [
        (numbers(rows, 4), numbers(rows, 3), torch.randint(20, (rows,))) for _ in range(STEPS)
    ]
    return [generator, judging], step, batches


ADVERSARIES = ("plain", "frozen", "clipped", "zeroed", "both", "again", "norms")
for _variant in ADVERSARIES:
    CASES[f"adversaries, {_variant}"] = lambda rows, variant=_variant: _adversaries(rows, variant)


@case
def critic_trained_more(rows: int) -> Built:
    generator, critic = mlp(3, 4), mlp(4, 1)
    of_generator = torch.optim.RMSprop(generator.parameters(), 1e-2)
    of_critic = torch.optim.RMSprop(critic.parameters(), 1e-2)

    def step(real: torch.Tensor, noise: torch.Tensor) -> Any:
        for _ in range(3):
            of_critic.zero_grad()
            loss = critic(generator(noise).detach()).mean() - critic(real).mean()
            loss.backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
        return loss

    return [generator, critic], step, [(numbers(rows, 4), numbers(rows, 3))] * STEPS


# -- Gradients that no backward() leaves ----------------------------------------------------


@case
def gradients_by_hand(rows: int) -> Built:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids), labels)
        found = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    ids = [(torch.randint(20, (rows, 2)), torch.randint(3, (rows,))) for _ in range(STEPS)]
    return [model], step, ids


@case
def gradients_that_disagree(rows: int) -> Built:
    """Of two losses, without what one takes back of the other (Yu et al. 2020, PCGrad)."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores, own = model(x), list(model.parameters())
        loss, other = F.cross_entropy(scores, labels), scores.pow(2).mean()
        ours = torch.autograd.grad(loss, own, retain_graph=True)
        theirs = torch.autograd.grad(other, own)
        for parameter, u, v in zip(own, ours, theirs, strict=True):
            along = (u * v).sum()
            parameter.grad = u + torch.where(along < 0, v - along / u.pow(2).sum() * u, v)
        optimizer.step()
        return loss

    return [model], step, classes(rows)


@case
def gradients_at_a_worse_place(rows: int) -> Built:
    """Taken where the loss is largest nearby (Foret et al. 2021, SAM)."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        own = list(model.parameters())
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in own]).norm() + 1e-12
            moves = [p.grad * (0.05 / norm) for p in own]
            for parameter, move in zip(own, moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for parameter, move in zip(own, moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        return loss

    return [model], step, classes(rows)


@case
def penalty_on_slopes(rows: int) -> Built:
    """The slope of a critic at a batch, differentiated further (Gulrajani et al. 2017)."""
    critic = mlp(4, 1)
    optimizer = torch.optim.Adam(critic.parameters(), 1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = critic(x).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [critic], step, [(numbers(rows, 4),)] * STEPS


def _by_hand(
    rows: int, gradients: Callable[[nn.Module, Any, Any], Sequence[torch.Tensor]]
) -> Built:
    """Gradients that the step computes itself, puts into .grad, and clips together."""
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = gradients(model, x, labels)
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5 + 0.01 * parameter.detach()
        optimizer.step()
        return norm

    return [model], step, classes(rows)


@case
def gradients_of_functions(rows: int) -> Built:
    def gradients(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return F.cross_entropy(torch.func.functional_call(model, values, (x,)), labels)

        values = {name: value.detach() for name, value in model.named_parameters()}
        return list(torch.func.grad(loss)(values).values())

    return _by_hand(rows, gradients)


@case
def gradients_of_each_row(rows: int) -> Built:
    """As for differential privacy: each row's gradient is clipped by itself."""

    def gradients(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        def loss(values: Any, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            scores = torch.func.functional_call(model, values, (row[None],))
            return F.cross_entropy(scores, label[None])

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        found = each(dict(model.named_parameters()), x, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        scales = (0.1 / norms).clamp(max=1.0)
        return [torch.einsum("b,b...->...", scales, g) / len(x) for g in found.values()]

    return _by_hand(rows, gradients)


@case
def gradients_of_a_copy(rows: int) -> Built:
    """MAML of first order: a copy learns, and its last gradients are the model's."""

    def gradients(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
        copied = copy.deepcopy(model)
        # What it learns first is the same on all workers, so that their mean is one device's.
        weight = copied[0].weight
        (slope,) = torch.autograd.grad(weight.square().mean(), [weight])
        weight.data = weight.data - 0.1 * slope
        loss = F.cross_entropy(copied(x), labels)
        return torch.autograd.grad(loss, list(copied.parameters()), create_graph=True)

    return _by_hand(rows, gradients)


class _Recomputed(torch.autograd.Function):
    """Runs a layer again in its backward pass, as reversible networks and adjoint methods do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module, *weights: torch.Tensor) -> Any:
        ctx.layer, ctx.weights = layer, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        own, *others = torch.autograd.grad(y, [x, *ctx.weights], gradient)
        return own, None, *others


@case
def layers_that_are_run_again(rows: int) -> Built:
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(_Recomputed.apply(x, model, *model.parameters()), labels)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, classes(rows)


def _cleared(rows: int, first: bool) -> Built:
    """Updates by hand, with gradients that grad.zero_() clears before or after."""
    model, unused = mlp(4, 3), mlp(3, 1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parameters = list(model.parameters())
        for parameter in parameters if first else []:
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = F.cross_entropy(model(x), labels) + unused(model(x)).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(0.1 * parameter.grad)
                if not first:
                    parameter.grad.zero_()
        return loss

    return [model, unused], step, classes(rows)


@case
def gradients_cleared_first(rows: int) -> Built:
    return _cleared(rows, True)


@case
def gradients_cleared_last(rows: int) -> Built:
    return _cleared(rows, False)


@case
def a_penalty_that_sets_in(rows: int) -> Built:
    """Python that decides by a float of the batch, and computes with it."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor, time: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        if time > 0:
            loss = loss + max(time, 0.2) * math.exp(-time) * model[0].weight.square().sum()
        loss = loss * (1 + math.cos(math.pi * time)) / math.log(8 * (time + 1), 2)
        loss.backward()
        optimizer.step()
        return loss

    times = (0.0, 0.1, 0.5, -0.3, 0.0)
    return [model], step, [(*classes(rows)[0], time) for time in times]


@case
def counted_steps(rows: int) -> Built:
    """A weight that grows with a whole number of the batch, which becomes an input."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
        optimizer.zero_grad()
        weight = min(1.0, count / 6) if isinstance(count, int) else 7.0
        loss = F.cross_entropy(model(x), labels) * weight * 0.9**count
        if count % 3 == 2:
            loss = loss + model[0].weight.square().sum() * (count // 2)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(*classes(rows)[0], count) for count in range(1, 10)]


# -- Tools around the model -----------------------------------------------------------------


@case
def compiled_by_torch(rows: int) -> Built:
    """The model, a part of it, and a function of the user's."""
    model = mlp(4, 3)
    model[0].compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = torch.compile(model, backend="eager")

    @torch.compile(backend="eager", fullgraph=True)
    def criterion(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, labels)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(whole(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return [whole], step, classes(rows)


@case
def averaged_model(rows: int) -> Built:
    """Which decides by a counter whether to copy or to average."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss

    return [model, average], step, classes(rows)


@case
def connectionist_loss(rows: int) -> Built:
    """CTC, with lengths from the batch, and with those of Python."""
    model = mlp(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(
        x: torch.Tensor, symbols: torch.Tensor, lengths: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(x).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, symbols, lengths, wanted)
        loss = loss + F.ctc_loss(scores, symbols, (9,) * len(x), [3] * len(x), zero_infinity=True)
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (
            numbers(rows, 9, 4),
            torch.randint(1, 6, (rows, 3)),
            torch.randint(7, 10, (rows,)),
            torch.randint(1, 4, (rows,)),
        )
        for _ in range(STEPS)
    ]
    return [model], step, batches


@case
def policy_of_a_distribution(rows: int) -> Built:
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        policy = torch.distributions.Categorical(logits=model(x))
        loss = -policy.log_prob(actions).mean() - 0.01 * policy.entropy().mean()
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, classes(rows)


@case
def gradients_of_copies(rows: int) -> Built:
    """Of first-order MAML: each task's gradient is added to those of the parameters, in place or
    not, and to one of their own."""
    model = mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        for turn in range(4):
            learner = copy.deepcopy(model)
            F.cross_entropy(learner(x * (turn + 1)), labels).backward()
            for own, other in zip(model.parameters(), learner.parameters(), strict=True):
                assert own.grad is not None
                assert other.grad is not None
                if turn == 0:
                    own.grad = own.grad + other.grad / 4
                elif turn == 1:
                    own.grad += other.grad / 4
                else:
                    own.grad.add_(other.grad, alpha=0.25)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return [model], step, classes(rows)


@case
def complex_numbers(rows: int) -> Built:
    """A state space whose poles are real parameters and a number of Python's."""
    damping, turns = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
    optimizer = torch.optim.Adam([*damping.parameters(), *turns.parameters()], 1e-2)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        poles = -damping.weight.exp() + 1j * turns.weight.T
        kept = torch.exp(poles.unsqueeze(-1) * torch.arange(3)).real.sum(-1)
        loss = F.cross_entropy(x @ kept, labels)
        loss.backward()
        optimizer.step()
        return loss

    return [damping, turns], step, classes(rows)


@case
def unfrozen_in_the_step(rows: int) -> Built:
    """As GAN trainers have it, which freeze what is not trained; it was frozen before, too."""
    below, above = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
    below.requires_grad_(False)
    optimizer = torch.optim.Adam([*below.parameters(), *above.parameters()], 0.05)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        below.requires_grad_(True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(above(below(x).tanh()), labels)
        loss.backward()
        optimizer.step()
        below.requires_grad_(False)
        return loss

    return [below, above], step, classes(rows)
