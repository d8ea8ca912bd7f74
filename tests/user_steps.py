"""Steps as people write them, on several workers and on one device.

Each takes a seed's whole batch of ``rows`` rows and gives its models, its step and its batches. The
first dimension of every tensor of a batch is the rows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from torch import nn

from parallax.config import Config
from parallax.graph.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

LOCAL, STEPS, SEED = 3, 3, 11

Built = tuple[list[nn.Module], Callable[..., Any], list[tuple[torch.Tensor, ...]]]
CASES: dict[str, Callable[[int], Built]] = {}


def case(build: Callable[[int], Built]) -> Callable[[int], Built]:
    CASES[build.__name__] = build
    return build


def _numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def _classes(rows: int) -> list[tuple[torch.Tensor, ...]]:
    return [(_numbers(rows, 4), torch.randint(3, (rows,))) for _ in range(STEPS)]


# -- Two models that train each other -------------------------------------------------------


def _adversaries(rows: int, variant: str) -> Built:
    """A GAN whose discriminator has a table: the generator's backward pass leaves it gradients."""
    generator, critic, table = _mlp(3, 4), _mlp(8, 1), nn.Embedding(20, 4).double()
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
        (_numbers(rows, 4), _numbers(rows, 3), torch.randint(20, (rows,))) for _ in range(STEPS)
    ]
    return [generator, judging], step, batches


ADVERSARIES = ("plain", "frozen", "clipped", "zeroed", "both", "again", "norms")
for _variant in ADVERSARIES:
    CASES[f"adversaries, {_variant}"] = lambda rows, variant=_variant: _adversaries(rows, variant)


@case
def critic_trained_more(rows: int) -> Built:
    generator, critic = _mlp(3, 4), _mlp(4, 1)
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

    return [generator, critic], step, [(_numbers(rows, 4), _numbers(rows, 3))] * STEPS


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
    model = _mlp(4, 3)
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

    return [model], step, _classes(rows)


@case
def gradients_at_a_worse_place(rows: int) -> Built:
    """Taken where the loss is largest nearby (Foret et al. 2021, SAM)."""
    model = _mlp(4, 3)
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

    return [model], step, _classes(rows)


@case
def penalty_on_slopes(rows: int) -> Built:
    """The slope of a critic at a batch, differentiated further (Gulrajani et al. 2017)."""
    critic = _mlp(4, 1)
    optimizer = torch.optim.Adam(critic.parameters(), 1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = critic(x).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [critic], step, [(_numbers(rows, 4),)] * STEPS


# -- Tools around the model -----------------------------------------------------------------


@case
def compiled_by_torch(rows: int) -> Built:
    """The model, a part of it, and a function of the user's."""
    model = _mlp(4, 3)
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

    return [whole], step, _classes(rows)


@case
def averaged_model(rows: int) -> Built:
    """Which decides by a counter whether to copy or to average."""
    model = _mlp(4, 3)
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

    return [model, average], step, _classes(rows)


@case
def connectionist_loss(rows: int) -> Built:
    """CTC, with lengths from the batch."""
    model = _mlp(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(
        x: torch.Tensor, symbols: torch.Tensor, lengths: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(x).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, symbols, lengths, wanted)
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (
            _numbers(rows, 9, 4),
            torch.randint(1, 6, (rows, 3)),
            torch.randint(7, 10, (rows,)),
            torch.randint(1, 4, (rows,)),
        )
        for _ in range(STEPS)
    ]
    return [model], step, batches


@case
def policy_of_a_distribution(rows: int) -> Built:
    model = _mlp(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        policy = torch.distributions.Categorical(logits=model(x))
        loss = -policy.log_prob(actions).mean() - 0.01 * policy.entropy().mean()
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, _classes(rows)


# -- Tables and selections ------------------------------------------------------------------


def _looked_up(
    optimizer: Callable[..., torch.optim.Optimizer], table: nn.Module, rows: int, **options: Any
) -> Built:
    """A table, or bags of one, whose update is the point."""
    table.double()
    update = optimizer(table.parameters(), **options)

    def step(ids: torch.Tensor) -> torch.Tensor:
        update.zero_grad()
        loss = table(ids).square().mean()
        loss.backward()
        update.step()
        return loss

    ids = torch.int32 if isinstance(table, nn.EmbeddingBag) else torch.int64
    return [table], step, [(torch.randint(41, (rows, 3), dtype=ids),) for _ in range(STEPS)]


@case
def steps_by_signs(rows: int) -> Built:
    """Rprop, which writes where a condition holds."""
    return _looked_up(torch.optim.Rprop, nn.Embedding(41, 4), rows)


@case
def sparse_momentum(rows: int) -> Built:
    """A slot that is a sparse tensor."""
    table = nn.Embedding(41, 4, sparse=True)
    return _looked_up(torch.optim.SGD, table, rows, lr=0.1, momentum=0.9)


@case
def bags_of_short_ids(rows: int) -> Built:
    """Bags by int32, which say in the same type where they begin."""
    return _looked_up(torch.optim.SGD, nn.EmbeddingBag(41, 4, mode="sum"), rows, lr=0.1)


@case
def masked_words(rows: int) -> Built:
    """A layer for those positions alone that a mask selects: values say how many there are."""
    table, layer = nn.Embedding(23, 4).double(), nn.Linear(4, 23).double()
    optimizer = torch.optim.Adam([*table.parameters(), *layer.parameters()], 1e-2)

    def step(words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(table(words)[mask]), words[mask])
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> tuple[torch.Tensor, ...]:
        hidden = torch.rand(rows, 6).argsort(1) < 2  # as many of each sentence
        return torch.randint(23, (rows, 6)), hidden

    return [table, layer], step, [batch() for _ in range(STEPS)]


@case
def sparse_neighbours(rows: int) -> Built:
    """A graph as a sparse matrix that the step closes over (LightGCN)."""
    near = (torch.rand(30, 30) < 0.1).double().to_sparse_coo()
    nodes = nn.Embedding(30, 4).double()
    optimizer = torch.optim.Adam(nodes.parameters(), 1e-2)

    def step(users: torch.Tensor, liked: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = nodes.weight + torch.sparse.mm(near, nodes.weight)
        better = (found[users] * (found[liked] - found[others])).sum(1)
        loss = -F.logsigmoid(better).mean()
        loss.backward()
        optimizer.step()
        return loss

    sizes = (3, rows)
    return [nodes], step, [tuple(torch.randint(30, sizes).unbind()) for _ in range(STEPS)]


@case
def averaged_table(rows: int) -> Built:
    """A moving average of all tensors at once, which copies them when it begins."""
    table = nn.Embedding(41, 4).double()
    average = torch.optim.swa_utils.AveragedModel(
        table, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(ids).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(table)
        return loss

    return [table, average], step, [(torch.randint(41, (rows, 3)),) for _ in range(STEPS)]


# -- How tensors lie ------------------------------------------------------------------------


@case
def volume_of_columns(rows: int) -> Built:
    """A matrix that lies by columns, as those of orthogonal decompositions do."""
    model = nn.Module()
    model.matrix = nn.Parameter(torch.linalg.qr(_numbers(6, 6))[0])
    assert not model.matrix.is_contiguous()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ model.matrix).square().mean() - torch.linalg.slogdet(model.matrix)[1]
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(_numbers(rows, 6),) for _ in range(STEPS)]


def _transposed(rows: int, criterion: Callable[..., torch.Tensor]) -> Built:
    """A result that does not lie in order, of which kernels make gradients that do."""
    model = nn.Linear(6, 5).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x).transpose(1, 2), wanted)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(_numbers(rows, 4, 6), _numbers(rows, 5, 4)) for _ in range(STEPS)]


@case
def transposed_squares(rows: int) -> Built:
    return _transposed(rows, F.mse_loss)


@case
def transposed_activations(rows: int) -> Built:
    return _transposed(rows, lambda x, y: (F.softplus(F.hardtanh(x)) * F.relu6(y)).mean())


# -- Where people keep state ----------------------------------------------------------------


def _stepping(rows: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, _classes(rows)


class _Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, slow weights in a list, and how often it stepped in a tensor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.steps = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        for slow, parameter in zip(self.slow, parameters, strict=True):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow + 0.01 / self.steps)


class _Remembering(torch.optim.Optimizer):
    """Makes what it remembers when it needs it, in a dict of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.sums: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if number not in self.sums:
                    self.sums[number] = torch.zeros_like(parameter)
                parameter.sub_(group["lr"] * self.sums[number].mul_(0.9).add_(parameter.grad))


@case
def optimizer_of_an_optimizer(rows: int) -> Built:
    model = _mlp(4, 3)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return _stepping(rows, model, _Lookahead(inner))


@case
def optimizer_with_a_dict(rows: int) -> Built:
    model = _mlp(4, 3)
    return _stepping(rows, model, _Remembering(model.parameters()))


class _Sharpness(torch.optim.Optimizer):
    """SAM: climbs, and steps by another optimizer with the gradients of that place."""

    def __init__(self, parameters: Any, kind: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = kind(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        found = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for parameter in found:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad * 0.05 / norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()


@case
def sharpness_aware(rows: int) -> Built:
    model = _mlp(4, 3)
    optimizer = _Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.climb()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, _classes(rows)


class _Centred(nn.Module):
    """Keeps a tensor as a plain attribute, assigned anew, and another in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.pulls = torch.zeros(3, dtype=torch.float64)
        self.seen = [torch.zeros((), dtype=torch.float64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pulls = 0.5 * self.pulls + 0.1 * self.layer.weight.detach().sum(1)
        self.seen[0].add_(1)
        return self.layer(x) - self.pulls / self.seen[0]


@case
def attributes_of_a_module(rows: int) -> Built:
    model = _Centred()
    return _stepping(rows, model, torch.optim.SGD(model.parameters(), 0.1))


@case
def thawing(rows: int) -> Built:
    """A table and a layer that are trained from the second step on."""
    table, layer, head = nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.Sequential(table, layer, head).double()
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    models, step, _ = _stepping(rows, model, optimizer)

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randint(20, (rows,)), torch.randint(3, (rows,))

    return models, step, [batch() for _ in range(STEPS)]


# -- Containers of batches ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    labels: torch.Tensor


class Named(collections.UserDict):  # type: ignore[type-arg]
    """As tokenizers give it."""


# -- Running them ---------------------------------------------------------------------------


def build(name: str, rows: int) -> Built:
    torch.manual_seed(SEED)
    return CASES[name](rows)


def _between(name: str, models: list[nn.Module]) -> None:
    """What the script does between two steps."""
    if name == "thawing":
        models[0].requires_grad_(True)


def compare(world: World, name: str, builder: str) -> dict[str, float]:
    """How far parameters, and what the first step returns, are from one device's."""
    models, step, batches = build(name, LOCAL * world.size)
    returned = []
    for batch in batches:
        returned.append(step(*batch))
        _between(name, models)
    expected = [dict(model.state_dict()) for model in models]

    models, step, batches = build(name, LOCAL * world.size)
    config = Config(strategy=builder, workers=1)
    runner = Runner(step, discover(step), config, world)
    first = world.rank * LOCAL
    for number, batch in enumerate(batches):
        result = runner.run(*[item[first : first + LOCAL] for item in batch])
        if number == 0:
            start = result
        _between(name, models)
    state = runner.state_dict()
    names = {id(model): name for name, model in runner._objects.models.items()}
    found = [dict(state[names[id(model)]]) for model in models]
    shared = {} if "norms" not in name else {"norms": difference(returned[0][-1], start[-1])}
    return {"parameters": difference(expected, found), **shared}
