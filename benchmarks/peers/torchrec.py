"""TorchRec: tables over workers row by row or table by table, the rest under DDP.

As its guides advise: embedding collections in place of the modules, an optimizer fused with the
backward pass, one exchange of ids and one of rows for all tables. ``torchrec.txt`` has versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchrec
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks.workloads import Batch, Step, Training, make_step
from examples.dlrm.model import DLRM
from examples.lm.model import LanguageModel
from examples.lm.sampling import log_expected_count, log_uniform_sample, sampled_softmax_loss

CPU = torch.device("cpu")


def build(training: Training, option: str) -> Step:
    """A step of TorchRec.

    Args:
        training: what to train.
        option: how tables are placed, ``"row"`` or ``"table"``; after a slash, ``ahead``: with its
            pipeline, which sends ids of the next batch while the present one computes.
    """
    option, _, how = option.partition("/")
    torch.manual_seed(0)
    plain = training.model(False)
    model: nn.Module
    if isinstance(plain, LanguageModel):
        model, tables = _language_model(plain)
        load = dict.fromkeys(tables, 1)
        sharder: Any = EmbeddingCollectionSharder()  # dedup of ids has no CPU kernel
    elif isinstance(plain, DLRM):
        model, tables = _dlrm(plain, _PipelinedClicks if how == "ahead" else _Clicks)
        load = _bag_sizes(training.batch())
        sharder = EmbeddingBagCollectionSharder()
    else:
        raise ValueError(f"no TorchRec form of {type(plain).__name__}")
    fused = training.optimizer(model.get_submodule("tables").parameters())
    _apply_optimizer_in_backward(
        type(fused), model.get_submodule("tables").parameters(), {"lr": fused.defaults["lr"]}
    )
    workers = dist.get_world_size()
    owners = _owners(load, workers)
    plan = construct_module_sharding_plan(
        model.get_submodule("tables"),
        {name: row_wise() if option == "row" else table_wise(rank=owners[name]) for name in tables},
        sharder=sharder,
        local_size=workers,
        world_size=workers,
        device_type="cpu",
    )
    placed = DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    _copy_rows(placed.module, tables)
    dense = [value for name, value in placed.named_parameters() if "tables." not in name]
    if how == "ahead":
        return _Pipelined(placed, training.optimizer(dense))
    # The tables' own optimizer runs in backward; zero_grad and step here are the dense part's.
    return make_step(training, model, placed, training.optimizer(dense))


def _owners(load: dict[str, int], workers: int) -> dict[str, int]:
    """The largest table that is left to the worker with the least work: balanced owners."""
    work = [0] * workers
    owners = {}
    for name in sorted(load, key=lambda name: -load[name]):
        owners[name] = work.index(min(work))
        work[owners[name]] += load[name]
    return owners


def _bag_sizes(batch: Batch) -> dict[str, int]:
    return {f"t{number}": ids.shape[1] for number, ids in enumerate(batch[1])}


def _copy_rows(model: nn.Module, tables: dict[str, torch.Tensor]) -> None:
    """Give shards the first values that the plain model's tables have."""
    module = model.module if hasattr(model, "module") else model
    for key, value in module.get_submodule("tables").state_dict().items():
        whole = tables[key.split(".")[-2]]
        if not isinstance(value, ShardedTensor):
            raise TypeError(f"{key} is not sharded")
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            rows, columns = shard.metadata.shard_sizes
            shard.tensor.detach().copy_(whole[row : row + rows, column : column + columns])


class _Words(nn.Module):
    """The language model with both tables in one collection.

    A softmax row ends in its bias, and both tables' rows are as wide, since all of a collection's
    tables must be: so all rows of a step travel in one message.
    """

    def __init__(self, plain: LanguageModel, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.lstm = plain.lstm
        self.sampled, self.vocab = plain.sampled, plain.vocab
        self.embedding = plain.embedding.embedding_dim
        self.projection = plain.softmax_weight.embedding_dim

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = targets.flatten()
        sampled = log_uniform_sample(self.sampled, self.vocab, targets.device)
        ids = torch.cat([targets, sampled])
        asked = KeyedJaggedTensor(
            ["words", "classes"],
            torch.cat([tokens.flatten(), ids]),
            lengths=torch.tensor([tokens.numel(), len(ids)]),
        )
        rows = self.tables(asked)
        words = rows["words"].values()[:, : self.embedding].view(*tokens.shape, -1)
        classes = rows["classes"].values()
        output, _ = self.lstm(words)
        return sampled_softmax_loss(
            output.flatten(0, 1),
            targets,
            sampled,
            classes[:, : self.projection],
            classes[:, self.projection],
            log_expected_count(ids, self.sampled, self.vocab),
        )


def _language_model(plain: LanguageModel) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    wide = max(plain.embedding.embedding_dim, plain.softmax_weight.embedding_dim + 1)
    wide = -(-wide // 4) * 4  # its kernels want a multiple of four
    softmax = torch.cat([plain.softmax_weight.weight, plain.softmax_bias.weight], 1).detach()
    first = {"embedding": plain.embedding.weight.detach(), "softmax": softmax}
    tables = {name: F.pad(rows, (0, wide - rows.shape[1])) for name, rows in first.items()}
    features = {"embedding": "words", "softmax": "classes"}
    collection = torchrec.EmbeddingCollection(
        device=CPU,
        tables=[
            torchrec.EmbeddingConfig(
                name=name, embedding_dim=wide, num_embeddings=len(rows), feature_names=[feature]
            )
            for (name, rows), feature in zip(tables.items(), features.values(), strict=True)
        ],
    )
    return _Words(plain, collection), tables


class _Clicks(nn.Module):
    """DLRM with its tables in one collection of bags."""

    def __init__(self, plain: DLRM, tables: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.tables = tables
        self.names = list(names)
        self.bottom, self.top = plain.bottom, plain.top
        self.register_buffer("pairs", plain.pairs, persistent=False)

    def forward(self, numbers: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        # Bags come in the order of their owners.
        return self.scores(numbers, self.tables(_asked(self.names, ids)))

    def scores(self, numbers: torch.Tensor, bags: Any) -> torch.Tensor:
        dense = F.relu(self.bottom(numbers))
        vectors = torch.stack([dense, *(bags[name] for name in self.names)], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def _asked(names: list[str], ids: list[torch.Tensor]) -> KeyedJaggedTensor:
    """The ids of all tables, in the form that collections take."""
    batch = len(ids[0])
    return KeyedJaggedTensor(
        names,
        torch.cat([wanted.flatten() for wanted in ids]),
        lengths=torch.tensor([wanted.shape[1] for wanted in ids]).repeat_interleave(batch),
    )


@dataclass
class _Samples(Pipelineable):
    """A batch in the form that the pipeline takes."""

    numbers: torch.Tensor
    asked: KeyedJaggedTensor
    clicks: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> _Samples:
        return self  # all of it is on the CPU

    def record_stream(self, stream: Any) -> None:
        pass


class _PipelinedClicks(_Clicks):
    """The same with its loss, of a batch as the pipeline passes it on."""

    def forward(self, batch: _Samples) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = self.scores(batch.numbers, self.tables(batch.asked))
        loss = F.binary_cross_entropy_with_logits(scores, batch.clicks)
        return loss, loss


class _Pipelined:
    """Steps of TorchRec's pipeline; its batches are read ahead if they come of ``over``."""

    def __init__(self, model: DistributedModelParallel, optimizer: torch.optim.Optimizer) -> None:
        self._names = model.module.names
        self._pipeline = TrainPipelineSparseDist(model, optimizer, CPU, execute_all_batches=True)
        self._source: Iterator[_Samples] | None = None

    def __call__(self, *batch: Any) -> torch.Tensor:
        source = self._source if not batch else iter([self._samples(batch)])
        loss: torch.Tensor = self._pipeline.progress(source)
        return loss

    def over(self, batches: Iterable[Batch]) -> Iterator[tuple[()]]:
        """The pipeline reads the batches itself."""
        self._source = map(self._samples, batches)
        return itertools.repeat(())

    def _samples(self, batch: Batch) -> _Samples:
        numbers, ids, clicks = batch
        return _Samples(numbers, _asked(self._names, ids), clicks)


def _dlrm(plain: DLRM, form: type[_Clicks]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    tables = {f"t{number}": bag.weight.detach() for number, bag in enumerate(plain.tables)}
    collection = torchrec.EmbeddingBagCollection(
        device=CPU,
        tables=[
            torchrec.EmbeddingBagConfig(
                name=name,
                embedding_dim=rows.shape[1],
                num_embeddings=len(rows),
                feature_names=[name],
                pooling=torchrec.PoolingType.SUM,
            )
            for name, rows in tables.items()
        ],
    )
    return form(plain, collection, tables), tables
