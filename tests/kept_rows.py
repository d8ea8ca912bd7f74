"""Steps that put rows of the batch, or how many there are, into their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

WIDTH, FEATURES, CLASSES, ITEMS = 4, 5, 3, 40

T = torch.Tensor
Loss = Callable[[Any, T, T, T, T], T]
"""Of a model, rows, others of the same items, their classes, and which items they are."""


class Model(nn.Module):
    """An encoder, one that follows it, and state of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, FEATURES))
        self.follower = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, FEATURES))
        self.follower.load_state_dict(self.encoder.state_dict())
        self.follower.requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.double()
        kinds = {"dtype": torch.float64}
        self.register_buffer("queue", F.normalize(torch.randn(FEATURES, 24, **kinds), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.register_buffer("bank", F.normalize(torch.randn(ITEMS, FEATURES, **kinds), dim=1))
        self.register_buffer("targets", torch.zeros(ITEMS, CLASSES, **kinds))
        self.register_buffer("seen", torch.zeros(ITEMS, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(1e-4, **kinds))
        self.register_buffer("mean", torch.zeros(WIDTH, **kinds))
        self.register_buffer("var", torch.ones(WIDTH, **kinds))
        self.found, self.spread, self.rows = self.mean.clone(), self.var.clone(), 1e-4
        self.recent = torch.zeros(24, FEATURES, **kinds)
        self.lanes = torch.zeros(ITEMS, FEATURES, **kinds)


def _follow(m: Any, share: float = 0.9) -> None:
    for own, other in zip(m.follower.parameters(), m.encoder.parameters(), strict=True):
        own.data = own.data * share + other.data * (1 - share)


def _queued(m: Any, x: T, other: T, y: T, items: T) -> T:
    """He et al. 2020 (MoCo), as published: a queue of keys with a pointer."""
    query = F.normalize(m.encoder(x), dim=1)
    with torch.no_grad():
        _follow(m)
        key = F.normalize(m.follower(other), dim=1)
    alike = torch.einsum("nc,nc->n", [query, key]).unsqueeze(-1)
    others = torch.einsum("nc,ck->nk", [query, m.queue.clone().detach()])
    scores = torch.cat([alike, others], dim=1) / 0.2
    with torch.no_grad():
        rows, place = key.shape[0], int(m.place)
        assert m.queue.shape[1] % rows == 0
        m.queue[:, place : place + rows] = key.T
        m.place[0] = (place + rows) % m.queue.shape[1]
    return F.cross_entropy(scores, torch.zeros(scores.shape[0], dtype=torch.long))


def _nearest(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Dwibedi et al. 2021 (NNCLR): neighbours among the last keys, which are put in front."""
    found, keys = F.normalize(m.encoder(x), dim=1), F.normalize(m.encoder(other), dim=1)
    near = m.recent[(found.detach() @ m.recent.T).argmax(1)]
    m.recent = torch.cat([keys.detach(), m.recent])[:24]
    return -(near * keys).sum(1).mean() + (found - keys).square().mean()


def _shifted(m: Any, x: T, other: T, y: T, items: T) -> T:
    """A queue that is shifted in place."""
    keys = m.encoder(x)
    loss = (keys @ m.queue.clone()).square().mean()
    rows = keys.shape[0]
    with torch.no_grad():
        m.queue.copy_(torch.cat([m.queue[:, rows:], keys.detach().T], 1))
    return loss


def _bank(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Wu et al. 2018 (instance discrimination): features of all items, followed slowly."""
    found = F.normalize(m.encoder(x), dim=1)
    loss = F.cross_entropy(found @ m.bank.clone().t() / 0.2, items)
    with torch.no_grad():
        old = torch.index_select(m.bank, 0, items)
        old.mul_(0.5).add_(found.detach() * 0.5)
        m.bank.index_copy_(0, items, F.normalize(old, dim=1))
    return loss


def _early(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Liu et al. 2020 (early learning): averages of what a model says of each item."""
    scores = m.head(m.encoder(x))
    shares = scores.softmax(1).clamp(1e-4, 1 - 1e-4)
    now = shares.detach()
    m.targets[items] = 0.7 * m.targets[items] + 0.3 * now / now.sum(1, keepdim=True)
    own = (m.targets[items] * shares).sum(1)
    return F.cross_entropy(scores, y) + 3 * (1 - own).log().mean()


def _seen(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Items that were seen weigh less; several rows may be of one."""
    few = items % 5
    weights = 1 - 0.5 * m.seen[few].double()
    loss = (F.cross_entropy(m.head(m.encoder(x)), y, reduction="none") * weights).mean()
    m.seen[few] = True
    return loss


def _norms(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Losses of items by which they are weighed the next time (Schaul et al. 2015)."""
    each = F.cross_entropy(m.head(m.encoder(x)), y, reduction="none")
    loss = (each * (1 + m.targets[items, 0])).mean()
    with torch.no_grad():
        m.targets[items, 0] = each.detach().abs() + 1e-6
    return loss


def _moments(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Moments of all rows that were seen, in buffers (Chan et al. 1979)."""
    with torch.no_grad():
        mean, var, rows = x.mean(0), x.var(0, unbiased=False), x.shape[0]
        off, total = mean - m.mean, m.count + rows
        squares = m.var * m.count + var * rows + off**2 * m.count * rows / total
        m.mean.copy_(m.mean + off * rows / total)
        m.var.copy_(squares / total)
        m.count.copy_(total)
    scores = m.head(m.encoder((x - m.mean) / torch.sqrt(m.var + 1e-8)))
    return F.cross_entropy(scores, y)


def _moments_of_attributes(m: Any, x: T, other: T, y: T, items: T) -> T:
    """The same in attributes, as in RunningMeanStd of Gym and its like."""
    with torch.no_grad():
        mean, var, rows = x.mean(0), x.var(0, unbiased=False), x.shape[0]
        off, total = mean - m.found, m.rows + rows
        squares = m.spread * m.rows + var * rows + torch.square(off) * m.rows * rows / total
        m.found, m.spread, m.rows = m.found + off * rows / total, squares / total, total
    return F.cross_entropy(m.head(m.encoder((x - m.found) / torch.sqrt(m.spread + 1e-8))), y)


def _unbiased(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Batch normalisation by hand, whose running variance is unbiased."""
    rows = x.shape[0]
    mean, var = x.mean(0), x.var(0, unbiased=False)
    with torch.no_grad():
        m.mean.copy_(0.9 * m.mean + 0.1 * mean)
        m.var.copy_(0.9 * m.var + 0.1 * var * rows / (rows - 1))
    return F.cross_entropy(m.head(m.encoder((x - mean) / (var + m.var).sqrt())), y)


def _normed(m: Any, x: T, other: T, y: T, items: T) -> T:
    """The same of what a model makes, with gradients."""
    z = m.encoder(x)
    mean, var, rows = z.mean(0), z.var(0, unbiased=False), z.shape[0]
    with torch.no_grad():
        m.bank[0] = 0.9 * m.bank[0] + 0.1 * mean
        m.bank[1] = 0.9 * m.bank[1] + 0.1 * var * rows / (rows - 1)
    return F.cross_entropy(m.head((z - mean) / (var + 1e-3).sqrt()), y)


def _counted(m: Any, x: T, other: T, y: T, items: T) -> T:
    """A weight that grows with the rows that were seen."""
    m.count += len(x)
    loss = F.cross_entropy(m.head(m.encoder(x)), y)
    return loss + torch.tanh(m.count / 50) * m.encoder(other).square().mean()


def _centres(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Wen et al. 2016 (center loss), as often implemented: by how many rows a class has."""
    found = m.encoder(x)
    near = m.bank.clone().index_select(0, y)
    loss = F.cross_entropy(m.head(found), y) + 0.1 * (found - near).pow(2).sum(1).mean()
    with torch.no_grad():
        _, places, counts = torch.unique(y, return_inverse=True, return_counts=True)
        off = (near - found.detach()) / (1 + counts[places].view(-1, 1))
        m.bank.index_add_(0, y, -0.5 * off)
    return loss


def _for_evaluation(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Numbers in buffers that no gradient follows from: confusions of classes, and medians."""
    scores = m.head(m.encoder(x))
    with torch.no_grad():
        found = y * CLASSES + scores.argmax(1)
        confusions = torch.bincount(found, minlength=CLASSES**2).view(CLASSES, CLASSES)
        m.targets[:CLASSES] += confusions
        m.mean.copy_(0.9 * m.mean + 0.1 * x.median(0)[0])
    return F.cross_entropy(scores, y)


def _percentiles(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Hafner et al. 2023 (a range of returns by percentiles)."""
    low, high = (torch.quantile(x.sum(1), share) for share in (0.05, 0.95))
    m.mean[0] = 0.9 * m.mean[0] + 0.1 * low
    m.mean[1] = 0.9 * m.mean[1] + 0.1 * high
    weight = (x.sum(1) - m.mean[0]) / torch.clamp(m.mean[1] - m.mean[0], min=1.0)
    return (F.cross_entropy(m.head(m.encoder(x)), y, reduction="none") * weight.detach()).mean()


def _radius(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Ruff et al. 2018 (Deep SVDD with a soft boundary)."""
    over = m.encoder(x).square().sum(1) - m.mean[0] ** 2
    return m.mean[0] ** 2 + 10 * torch.max(torch.zeros_like(over), over).mean()


def _keep_radius(m: Any, x: T, other: T, y: T, items: T) -> None:
    far = m.encoder(x).square().sum(1).detach()
    m.mean[0] = torch.quantile(far.sqrt(), 0.9)


LOSSES: dict[str, Loss] = {
    "queue with a pointer": _queued,
    "queue put together": _nearest,
    "queue shifted": _shifted,
    "bank": _bank,
    "averages of items": _early,
    "items that were seen": _seen,
    "losses of items": _norms,
    "moments in buffers": _moments,
    "moments in attributes": _moments_of_attributes,
    "unbiased variance": _unbiased,
    "normed by hand": _normed,
    "rows counted": _counted,
    "centres": _centres,
    "for evaluation": _for_evaluation,
    "percentiles": _percentiles,
    "radius": _radius,
}
"""Whose state is that of one device."""
AFTERWARDS: dict[str, Callable[..., None]] = {"radius": _keep_radius}
"""What some do when parameters have changed."""


def _recurrent(m: Any, x: T, other: T, y: T, items: T) -> T:
    """A state with a row for each of the batch."""
    before = 0 if not hasattr(m, "hidden") else m.hidden
    hidden = torch.tanh(m.encoder(x) + before)
    m.hidden = hidden.detach()
    return F.cross_entropy(m.head(hidden), y)


def _begun_anew(m: Any, x: T, other: T, y: T, items: T) -> T:
    """A state that is set to zeros for the next step."""
    hidden = torch.tanh(m.encoder(x) + getattr(m, "before", 0))
    m.before = torch.zeros(len(x), FEATURES, dtype=x.dtype)
    return F.cross_entropy(m.head(hidden), y)


def _with_lanes(m: Any, x: T, other: T, y: T, items: T) -> T:
    """A state with a row for each of the largest batch."""
    rows = x.shape[0]
    hidden = torch.tanh(m.encoder(x) + m.lanes[:rows].clone())
    loss = F.cross_entropy(m.head(hidden), y)
    with torch.no_grad():
        m.lanes[:rows] = hidden
    return loss


def _looked_at(m: Any, x: T, other: T, y: T, items: T) -> T:
    """What people look at afterwards."""
    found = m.encoder(x)
    m.first, m.rows = found[0].detach(), len(x)
    return F.cross_entropy(m.head(found), y)


def _one_by_one(m: Any, x: T, other: T, y: T, items: T) -> T:
    """Python counts the rows."""
    keys = m.encoder(x)
    loss = (keys @ m.queue.clone()).square().mean()
    m.bank[items] = keys.detach() + torch.triu_indices(len(x), 1).sum()
    return loss


TOLD: dict[str, Loss] = {"one by one": _one_by_one}
"""Whose state is this worker's own, which is told."""
OWN: dict[str, Loss] = {
    "recurrent": _recurrent,
    "with lanes": _with_lanes,
    "begun anew": _begun_anew,
    "looked at": _looked_at,
}
"""Whose state is this worker's own, and sends nothing."""


def build(name: str) -> tuple[Model, Callable[..., T]]:
    """A model and the step that trains it."""
    model, loss = Model(), {**LOSSES, **OWN, **TOLD}[name]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9)

    def step(*batch: T) -> T:
        optimizer.zero_grad()
        found = loss(model, *batch)
        found.backward()
        optimizer.step()
        if name in AFTERWARDS:
            AFTERWARDS[name](model, *batch)
        return found

    return model, step


def batches(division: Sequence[Sequence[int]]) -> list[list[tuple[T, ...]]]:
    """By step and worker, so many rows."""
    made = torch.Generator().manual_seed(4)
    found = []
    for counts in division:
        items = torch.randperm(ITEMS, generator=made).split([*counts, ITEMS - sum(counts)])
        found.append(
            [
                (
                    *torch.randn(2, rows, WIDTH, generator=made, dtype=torch.float64),
                    torch.randint(CLASSES, (rows,), generator=made),
                    one,
                )
                for rows, one in zip(counts, items, strict=False)
            ]
        )
    return found


def train(
    world: World, name: str, division: Sequence[Sequence[int]], strategy: str
) -> tuple[float, int, list[str]]:
    """How far parameters and buffers are from those of one device, which has all workers' batches
    as one; the bytes of rows that were sent, and warnings."""
    given = batches(division)
    model, step = build(name)
    for parts in given:
        step(*(torch.cat(one) for one in zip(*parts, strict=True)))
    model_here, step = build(name)
    with warnings_of_parallax() as said:
        runner = Runner(step, discover(step), Config(workers=1, strategy=strategy), world)
        before = _sent(runner)
        for parts in given:
            runner.run(*parts[world.rank])
    found = dict(runner.state_dict()["model"])
    assert model_here.place.dtype == torch.long
    return difference(dict(model.state_dict()), found), _sent(runner) - before, said


def _sent(runner: Runner) -> int:
    return sum(runner.traffic.get(kind, 0) for kind in ("rows of all batches", "batch rows"))
