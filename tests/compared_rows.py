"""Losses that compare rows of the batch with each other: for the tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

USERS, ITEMS, WIDTH, KINDS = 50, 40, 5, 3


class Towers(nn.Module):
    """Users and items, each as a vector of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 6), nn.Embedding(ITEMS, 6)
        self.of_users, self.of_items = nn.Linear(6, WIDTH), nn.Linear(6, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, i: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        users, items = self.of_users(self.users(i)), self.of_items(self.items(j))
        return F.normalize(users, dim=1), F.normalize(items, dim=1)


Loss = Callable[[Towers, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the towers, users, items and kinds of these, each [rows]."""
LOSSES: dict[str, Loss] = {}
"""Those that compare rows."""
OWN: dict[str, tuple[Loss, str]] = {}
"""Those in which each worker compares its own, and what is said."""
ALONE: dict[str, Loss] = {}
"""Those that compare none."""


def _loss(name: str) -> Callable[[Loss], Loss]:
    def note(loss: Loss) -> Loss:
        LOSSES[name] = loss
        return loss

    return note


def _own(name: str, said: str) -> Callable[[Loss], Loss]:
    def note(loss: Loss) -> Loss:
        OWN[name] = loss, said
        return loss

    return note


def _alone(name: str) -> Callable[[Loss], Loss]:
    def note(loss: Loss) -> Loss:
        ALONE[name] = loss
        return loss

    return note


def _scores(model: Towers, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    return (a * b).sum(1)


def _each(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(i, j)[0][:, :KINDS], y, reduction="none")


@_loss("CLIP")
def clip(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    logits = model.scale.exp() * a @ b.t()
    labels = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@_loss("two views in one")
def _two_views(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.cat(model(i, j))
    rows = len(i)
    similar = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -9e15)
    return F.cross_entropy(similar, (torch.arange(2 * rows) + rows) % (2 * rows))


@_loss("two views in one pass")
def _one_pass(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(model.of_users(model.users(torch.cat([i, j]))), dim=1)
    a, b = z.chunk(2)
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))


@_loss("views side by side")
def _side_by_side(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = torch.stack([i, j], 1).flatten()
    z = F.normalize(model.of_users(model.users(both)), dim=1)
    similar = z @ z.t() - 1e9 * torch.eye(z.shape[0], dtype=z.dtype)
    return F.cross_entropy(similar, torch.arange(z.shape[0]) ^ 1)


@_loss("chosen by masks")
def _chosen(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.cat(model(i, j))
    count = len(z)
    alike = torch.arange(len(i)).repeat(2)
    alike = alike[:, None] == alike[None, :]
    others = ~torch.eye(count, dtype=torch.bool)
    similar = (z @ z.t())[others].view(count, -1)
    alike = alike[others].view(count, -1)
    near, far = similar[alike].view(count, -1), similar[~alike].view(count, -1)
    logits = torch.cat([near, far], 1) / 0.07
    return F.cross_entropy(logits, torch.zeros(count, dtype=torch.long))


@_loss("supervised")
def _supervised(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    views = torch.stack(model(i, j), 1)
    mask = torch.eq(y.view(-1, 1), y.view(1, -1)).double().repeat(2, 2)
    z = torch.cat(torch.unbind(views, dim=1), dim=0)
    logits = z @ z.t() / 0.07
    logits = logits - logits.max(dim=1, keepdim=True)[0].detach()
    places = torch.arange(2 * len(i)).view(-1, 1)
    others = torch.scatter(torch.ones_like(mask), 1, places, 0)
    mask = mask * others
    logs = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    return -((mask * logs).sum(1) / mask.sum(1)).view(2, len(i)).mean()


@_loss("hardest triplets")
def _triplets(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, _ = model(i, j)
    far = torch.cdist(a, a)
    same = y[:, None] == y[None, :]
    return F.relu((far * same).max(1)[0] - (far + 1e3 * same).min(1)[0] + 0.3).mean()


@_loss("hardest negative")
def _hardest(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    with torch.no_grad():
        near = (a @ b.t()).fill_diagonal_(-1e9).argmax(1)
    return F.relu(0.2 + (a - b).square().sum(1) - (a - b[near]).square().sum(1)).mean()


@_loss("sampled by frequency")
def _frequencies(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    logits = a @ b.t() - (j + 1).double().log()
    twice = (j[:, None] == j[None, :]) & ~torch.eye(len(j), dtype=torch.bool)
    weights = (1 + y).double()
    each = F.cross_entropy(logits.masked_fill(twice, -1e9), torch.arange(len(j)), reduction="none")
    return (each * weights).sum() / weights.sum()


@_loss("by sigmoid")
def _by_sigmoid(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    rows = a.shape[0]
    signs = 2 * torch.eye(rows, dtype=a.dtype) - torch.ones(rows, rows, dtype=a.dtype)
    logits = a @ b.t() * model.scale.exp() + model.of_users.bias[0]
    return -F.logsigmoid(logits * signs).sum() / rows


@_loss("uniformity")
def _uniformity(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    return (a - b).norm(dim=1).pow(2).mean() + torch.pdist(a).pow(2).mul(-2).exp().mean().log()


@_loss("discrepancy")
def _discrepancy(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)

    def kernel(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.cdist(first, second).square()).mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


@_loss("ranks of pairs")
def _ranks(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    score = _scores(model, i, j)
    above = (y[:, None] > y[None, :]).double()
    lead = score[:, None] - score[None, :]
    return (F.softplus(-lead) * above).sum() / above.sum().clamp(min=1)


@_loss("area under the curve")
def _area(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    score = _scores(model, i, j)
    positive, negative = score[y == 1], score[y != 1]
    return F.relu(1 - (positive[:, None] - negative[None, :])).mean()


@_loss("beside another loss")
def _beside(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    contrast = F.cross_entropy(a @ b.t(), torch.arange(len(a)))
    return F.cross_entropy(a[:, :KINDS], y) + 0.5 * contrast


@_loss("in one sum")
def _in_one_sum(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    contrast = F.cross_entropy(a @ b.t(), torch.arange(len(a)), reduction="sum")
    return (F.cross_entropy(a[:, :KINDS], y, reduction="sum") + 0.5 * contrast) / len(a)


@_loss("times another loss")
def _times(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    contrast = F.cross_entropy(a @ b.t(), torch.arange(len(a)))
    return contrast * F.cross_entropy(a[:, :KINDS], y)


@_loss("distilled relations")
def _relations(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    with torch.no_grad():
        wanted = torch.cdist(b, b)
        wanted = wanted / wanted[wanted > 0].mean()
    found = torch.cdist(a, a)
    return F.smooth_l1_loss(found / found[found > 0].mean(), wanted)


@_loss("independence")
def _independence(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    rows = len(a)
    centre = torch.eye(rows, dtype=a.dtype) - 1 / rows
    return torch.trace(a @ a.t() @ centre @ (b @ b.t()) @ centre) / rows**2


@_loss("attention among rows")
def _attention(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    mixed = torch.softmax(a @ b.t(), 1) @ b
    mixed = torch.softmax(mixed @ mixed.t(), 1) @ mixed
    return F.cross_entropy(model.of_items(torch.cat([mixed, mixed[:, :1]], 1))[:, :KINDS], y)


@_loss("pairs put together")
def _together(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    rows = a.shape[0]
    left, right = a.unsqueeze(1).expand(rows, rows, -1), b.unsqueeze(0).expand(rows, rows, -1)
    return F.cross_entropy(torch.cat([left, right], 2).tanh().sum(2), torch.arange(rows))


@_loss("mutual information")
def _information(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    score = torch.tanh(a @ b.t())
    gone = torch.diag(torch.full((len(a),), float("inf"), dtype=a.dtype))
    pairs = torch.tensor(len(a) * (len(a) - 1.0))
    return torch.logsumexp((score - gone).flatten(), 0) - pairs.log() - score.diag().mean()


@_loss("risk of those later")
def _risk(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cox's partial likelihood."""
    score = _scores(model, i, j)
    time, seen = i * 41 + j, (y > 0).double()
    later = (time[None, :] >= time[:, None]).double()
    return -((score - (later * score.exp()).sum(1).log()) * seen).sum() / seen.sum()


@_loss("risk in order")
def _risk_in_order(
    model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    order = torch.argsort(i * 41 + j, descending=True)
    score, seen = _scores(model, i, j)[order], (y > 0).double()[order]
    return -((score - torch.logcumsumexp(score, 0)) * seen).sum() / seen.sum()


@_loss("softmax over rows")
def _over_rows(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(_scores(model, i, j), 0) * _each(model, i, j, y)).sum()


@_loss("list of rows")
def _list(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -(torch.softmax(y.double(), 0) * _scores(model, i, j).log_softmax(0)).sum()


@_loss("the largest three")
def _largest(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _each(model, i, j, y).topk(3)[0].mean()


@_loss("hard examples")
def _hard(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = _each(model, i, j, y)
    return each[each.detach().topk(3)[1]].mean()


@_loss("ranks")
def _ranks_of_losses(
    model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """As numbers, and compared with one."""
    each = _each(model, i, j, y)
    rank = each.detach().argsort().argsort()
    return (each * (rank + 1) / len(rank)).mean() + (each * (rank < 3)).sum() / 3


@_loss("the smallest three")
def _smallest(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _each(model, i, j, y).sort()[0][:3].mean()


@_loss("below a quantile")
def _quantile(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = _each(model, i, j, y)
    return (each * (each.detach() < torch.quantile(each.detach(), 0.7))).mean()


@_loss("the worst row")
def _worst(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = _each(model, i, j, y)
    return each.max() + each.mean()


@_loss("less the median")
def _median(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    score = _scores(model, i, j)
    return (score - score.median()).abs().mean()


@_loss("above the median")
def _above(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each, time = _each(model, i, j, y), (i * 41 + j).double()
    return each[time > time.median()].mean() + (each * (time - time.median())).mean() / 1e3


@_loss("by the largest")
def _by_the_largest(
    model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    score = _scores(model, i, j)
    return (score / score.abs().max()).square().mean()


@_loss("standardised by the batch")
def _standardised(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in model(i, j))
    return F.cross_entropy(a @ b.t() / WIDTH, torch.arange(len(a)))


@_loss("with more negatives")
def _more(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Three for each row, which all rows see."""
    a, b = model(i, j)
    others = model.of_items(model.items((j[:, None] + torch.arange(1, 4)) % ITEMS))
    all_items = torch.cat([b, F.normalize(others, dim=2).view(-1, WIDTH)])
    return F.cross_entropy(a @ all_items.t() / 0.2, torch.arange(len(a)))


@_loss("within a checkpoint")
def _checkpointed(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(clip, model, i, j, y, use_reentrant=False)
    return found


@_loss("angles of pairs")
def _angles(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    similar = F.cosine_similarity(a[:, None], b[None], dim=-1) / 0.1
    return F.cross_entropy(similar, torch.arange(len(a)))


@_loss("circle")
def _circle(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, _ = model(i, j)
    similar = (a @ a.t()).flatten()
    same = (y[:, None] == y[None, :]).triu(1).flatten()
    other = (y[:, None] != y[None, :]).triu(1).flatten()
    near, far = similar[same], similar[other]
    near_by, far_by = (1.25 - near.detach()).clamp(0), (far.detach() + 0.25).clamp(0)
    pull = torch.logsumexp(-near_by * (near - 0.75) * 8, 0)
    return F.softplus(torch.logsumexp(far_by * (far - 0.25) * 8, 0) + pull)


@_own("dropout of pairs", "as random numbers are drawn for it")
def _dropout(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    return F.cross_entropy(F.dropout(a @ b.t(), 0.5), torch.arange(len(a)))


@_own("random pairs", "as random numbers are drawn for it")
def _random(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    seen = torch.rand(len(a), len(a)) < 0.5
    return ((a @ b.t()).square() * seen).mean()


@_own("slopes", "as gradients are differentiated further")
def _slopes(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    contrast = F.cross_entropy(a @ b.t(), torch.arange(len(a)))
    (slope,) = torch.autograd.grad(contrast, a, create_graph=True)
    return contrast + slope.square().sum()


@_loss("as many as an expert takes")
def _as_many(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Fedus et al. 2021 (Switch): what comes later to an expert is left as it is."""
    a, b = model(i, j)
    gates, experts = a[:, :KINDS].softmax(1).max(1)
    chosen = F.one_hot(experts, KINDS)
    capacity = int(1.0 * len(a) / KINDS)
    places = torch.cumsum(chosen, 0) * chosen
    gates = gates * ((places <= capacity).long() * chosen).sum(1)
    return F.cross_entropy((a + gates[:, None] * b)[:, :KINDS], y)


@_own("decided by values", "as the step's Python decides by values of the batch")
def _decided(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    contrast = F.cross_entropy(a @ b.t() * model.scale, torch.arange(len(a)))
    return contrast * 2 if (y == 0).all() else contrast


@_own("compared at first", "as most layers of the model follow")
def _at_first(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    users = model.users(i)
    mixed = torch.softmax(users @ users.t(), 1) @ users
    return F.cross_entropy(model.of_items(mixed)[:, :KINDS], y)


@_own("by places", "as how many rows a batch has is asked for as a number")
def _by_places(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, _ = model(i, j)
    first, second = torch.triu_indices(len(a), len(a), 1)
    return (a[first] - a[second]).square().sum(1).mean()


@_own("counted by Python", "as how many rows a batch has is asked for as a number")
def _counted(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    contrast = F.cross_entropy(a @ b.t() * model.scale, torch.arange(len(a)))
    for place in range(len(a) // 3):
        contrast = contrast + b[place : place + 1].square().mean()
    return contrast


@_alone("attention in a row")
def _in_a_row(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    words = torch.stack([a, b, a * b, a + b], 1)  # as many as rows
    mixed = torch.softmax(words @ words.transpose(1, 2), 2) @ words
    return F.cross_entropy(mixed.mean(1)[:, :KINDS], y)


@_alone("put in order")
def _in_order(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As packed sequences are, and back."""
    lengths, order = (i % 7).sort(descending=True)
    a, _ = model(i[order], j[order])
    back = order.argsort()
    return F.cross_entropy((a * lengths.double()[:, None])[back][:, :KINDS], y)


@_alone("where bags begin")
def _bags(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By column, of flat rows."""
    a, b = model(i, j)
    lengths = 1 + torch.stack([i, j], 1) % 3
    begin = lengths.cumsum(0) - lengths
    flat = [
        rows.repeat_interleave(counts, 0)[first]
        for rows, counts, first in zip((a, b), lengths.unbind(1), begin.unbind(1), strict=True)
    ]
    return F.cross_entropy((flat[0] * flat[1])[:, :KINDS], y)


@_alone("classes as many as rows")
def _classes(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(i, j)
    return F.cross_entropy((a @ model.of_users.weight)[:, :4] * b[:, :4], y)


ALL: dict[str, Loss] = {
    **LOSSES,
    **ALONE,
    **{name: loss for name, (loss, _) in OWN.items()},
}
