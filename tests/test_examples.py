"""The examples' own parts, in plain PyTorch: sampler, loss, data, and that the models train."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.fetch import made_once
from examples.images import load_images
from examples.linear_regression import train as linear_regression
from examples.lm import data as lm_data
from examples.lm import train as lm_train
from examples.lm.model import LanguageModel, make_optimizer, make_step, perplexity
from examples.lm.sampling import log_expected_count, log_uniform_sample, sampled_softmax_loss
from examples.progress import Progress
from examples.resnet import model as resnet
from parallax.errors import DataError

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> lm_data.Corpus:
    """A part of the installed packages' text: always there."""
    return lm_data.load_corpus("programs", tmp_path_factory.mktemp("text"), program_bytes=500_000)


# Sampler


def test_expected_counts_are_the_frequencies_of_the_draws() -> None:
    torch.manual_seed(0)
    classes, count = 50, 400_000
    drawn = log_uniform_sample(count, classes, CPU)
    found = torch.bincount(drawn, minlength=classes).double()
    expected = log_expected_count(torch.arange(classes), count, classes).double().exp()
    assert float(expected.sum()) == pytest.approx(count, rel=1e-6)
    # Counts are binomial: five standard deviations.
    assert bool(((found - expected).abs() < 5 * expected.sqrt()).all())


def test_every_class_can_be_drawn_from_a_huge_vocabulary() -> None:
    torch.manual_seed(0)
    classes = 2_000_000
    drawn = log_uniform_sample(3_000_000, classes, CPU)
    assert int(drawn.min()) == 0
    assert int(drawn.max()) < classes
    tail = drawn[drawn > classes // 2]
    # Float32 would reach only every second of these.
    assert bool((tail % 2 == 0).any())
    assert bool((tail % 2 == 1).any())


# Sampled softmax


def test_loss_over_all_classes_is_the_full_softmax() -> None:
    torch.manual_seed(0)
    words, classes, features = 12, 30, 8
    hidden = torch.randn(words, features, dtype=torch.float64)
    table = torch.randn(classes, features, dtype=torch.float64)
    bias = torch.randn(classes, dtype=torch.float64)
    targets = torch.randint(classes, (words,))
    everything = torch.arange(classes)
    ids = torch.cat([targets, everything])
    loss = sampled_softmax_loss(
        hidden, targets, everything, table[ids], bias[ids], torch.zeros(len(ids))
    )
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ table.T + bias, targets))


def test_loss_agrees_with_brute_force_over_words_and_candidates() -> None:
    torch.manual_seed(1)
    words, classes, features, count = 6, 20, 4, 9
    hidden = torch.randn(words, features, dtype=torch.float64)
    table = torch.randn(classes, features, dtype=torch.float64)
    bias = torch.randn(classes, dtype=torch.float64)
    targets = torch.randint(5, (words,))
    sampled = log_uniform_sample(count, classes, CPU)
    assert set(targets.tolist()) & set(sampled.tolist()), "no accidental hit to be masked"
    ids = torch.cat([targets, sampled])
    loss = sampled_softmax_loss(
        hidden, targets, sampled, table[ids], bias[ids], log_expected_count(ids, count, classes)
    )

    def logit(word: int, wanted: int) -> float:
        probability = np.log((wanted + 2) / (wanted + 1)) / np.log(classes + 1)
        plain = float(hidden[word] @ table[wanted] + bias[wanted])
        return plain - float(np.log(count * probability))

    losses = []
    for word, target in enumerate(targets.tolist()):
        others = [wanted for wanted in sampled.tolist() if wanted != target]
        scores = np.array([logit(word, wanted) for wanted in [target, *others]])
        losses.append(np.log(np.exp(scores).sum()) - scores[0])
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-6)


def test_corrected_sum_over_a_sample_estimates_the_partition_function() -> None:
    torch.manual_seed(2)
    classes, count = 1000, 200_000
    logits = torch.randn(classes, dtype=torch.float64)
    sampled = log_uniform_sample(count, classes, CPU)
    estimate = (logits[sampled] - log_expected_count(sampled, count, classes)).exp().sum()
    torch.testing.assert_close(estimate, logits.exp().sum(), rtol=0.03, atol=0)


# Text


def test_a_text_file_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The cat saw the dog , and the dog ran .\nIt ran !", encoding="utf-8")
    corpus = lm_data.load_corpus(str(file), tmp_path / "cache")
    assert corpus.decode(torch.from_numpy(np.array(corpus.ids))) == (
        "the cat saw the dog , and the dog ran . it ran !"
    )
    assert corpus.words[:2] == (lm_data.UNKNOWN_WORD, "the")
    again = lm_data.load_corpus(str(file), tmp_path / "cache")
    assert again.words == corpus.words
    assert np.array_equal(again.ids, corpus.ids)


def test_a_changed_text_file_is_encoded_anew(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one two", encoding="utf-8")
    lm_data.load_corpus(str(file), tmp_path)
    file.write_text("three four five", encoding="utf-8")
    assert len(lm_data.load_corpus(str(file), tmp_path).ids) == 3


def test_ranks_fall_by_frequency(programs: lm_data.Corpus) -> None:
    counts = np.bincount(programs.ids, minlength=len(programs.words))
    assert counts[lm_data.UNKNOWN] == 0
    assert (np.diff(counts[1:]) <= 0).all()
    assert programs.source == "installed Python packages"


def test_a_smaller_vocabulary_cuts_off_the_rare_words(programs: lm_data.Corpus) -> None:
    train, held_out = programs.within(100)
    assert len(train) + len(held_out) == len(programs.ids)
    assert int(train.max()) < 100
    assert 0.01 < len(held_out) / len(programs.ids) < 0.03
    whole = programs.within(len(programs.words))[0]
    assert torch.equal(torch.where(whole < 100, whole, 0), train)


def test_a_short_text_has_something_held_out() -> None:
    ids, words = lm_data.encode("to be or not to be , " * 150)
    train, held_out = lm_data.Corpus(ids, tuple(words), "test").within(100)
    assert len(train) + len(held_out) == 1050
    assert len(held_out) == 20


def test_marks_of_the_dictionary_are_dropped() -> None:
    marked = r'{Am[=e]n`}, \A`men"\ n. [1913 Webster] So be it. [WordNet 1.5]'
    assert lm_data._without_marks(marked).split() == ["Amen`", ",", "n.", "So", "be", "it."]


def test_an_empty_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="no file with text"):
        lm_data.load_corpus(str(tmp_path / "empty.txt"), tmp_path)


def test_streams_of_all_workers_cover_the_text_once() -> None:
    batch, unroll, shards = 3, 4, 2
    ids = torch.arange(batch * unroll * shards * 5 + 7, dtype=torch.int32)
    count = lm_data.batches_per_epoch(ids, batch, unroll, shards)
    assert count == 5
    seen = []
    for shard in range(shards):
        batches = lm_data.streams(ids, batch, unroll, shard, shards)
        previous = None
        for tokens, targets in itertools.islice(batches, count):
            assert tokens.shape == targets.shape == (batch, unroll)
            assert torch.equal(tokens + 1, targets)
            if previous is not None:
                assert torch.equal(previous[:, -1] + 1, tokens[:, 0]), "streams are contiguous"
            previous = tokens
            seen.append(tokens.flatten())
    assert sorted(torch.cat(seen).tolist()) == list(range(batch * unroll * shards * count))


def test_a_text_too_short_for_one_batch_is_refused() -> None:
    with pytest.raises(DataError, match="too few for one batch"):
        next(lm_data.streams(torch.arange(30), batch=4, unroll=8))


# Preparation


def test_what_is_made_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "made"

    def fails(path: Path) -> None:
        path.mkdir()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        made_once(target, fails)
    assert list(target.parent.iterdir()) == []
    assert made_once(target, lambda path: path.mkdir()) == target
    made_once(target, fails)  # It is there: nothing is made.


def test_only_the_first_process_of_a_host_prepares_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("examples.fetch.WAIT_SECONDS", 0)
    with pytest.raises(DataError, match="did not appear"):
        made_once(tmp_path / "made", lambda path: path.mkdir())


# Training


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_the_language_model_learns(programs: lm_data.Corpus, optimizer: str) -> None:
    torch.manual_seed(0)
    train, held_out = programs.within(2000)
    model = LanguageModel(2000, embedding=32, hidden=48, projection=32, sampled=64)
    step = make_step(model, make_optimizer(model, optimizer, lm_train.DEFAULT_LR[optimizer]))
    before = perplexity(model, held_out, limit=500)
    for tokens, targets in itertools.islice(lm_data.streams(train, 16, 10), 150):
        step(tokens, targets)
    after = perplexity(model, held_out, limit=500)
    assert before == pytest.approx(2000, rel=0.2)
    assert after < before / 4


def test_sparse_gradients_train_as_dense_ones_do(programs: lm_data.Corpus) -> None:
    train, _ = programs.within(500)
    losses = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = LanguageModel(500, 16, 24, 16, sampled=32, sparse=sparse)
        step = make_step(model, make_optimizer(model, "sgd", 0.5))
        batches = itertools.islice(lm_data.streams(train, 8, 5), 10)
        losses.append([float(step(*batch).detach()) for batch in batches])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_as_many_features_as_cells_need_no_projection() -> None:
    model = LanguageModel(50, embedding=8, hidden=8, projection=8, sampled=4)
    tokens = torch.randint(50, (2, 3))
    assert model.features(tokens).shape == (6, 8)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_residual_network_learns_digits(norm: resnet.Norm, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    data = load_images("digits", tmp_path)
    assert data.train_images.shape[1:] == (1, 8, 8)
    model = resnet.ResNet(blocks=1, width=8, norm=norm)
    step = resnet.make_step(model, resnet.make_optimizer(model, lr=0.05))
    for images, labels in itertools.islice(
        zip(data.train_images.split(64), data.train_labels.split(64), strict=True), 20
    ):
        loss = step(images, labels)
    assert float(loss.detach()) < 2.0  # log(10) = 2.3 at the beginning
    assert resnet.accuracy(model, data.test_images, data.test_labels) > 0.3


def test_the_line_is_found() -> None:
    torch.manual_seed(0)
    x, y = linear_regression.points(256, noise=0.0).tensors
    model = torch.nn.Linear(1, 1)
    step = linear_regression.make_step(model, torch.optim.SGD(model.parameters(), lr=0.3))
    for _ in range(100):
        step(x, y)
    assert model.weight.item() == pytest.approx(10, abs=1e-3)
    assert model.bias.item() == pytest.approx(-5, abs=1e-3)


# Flags and progress


def test_a_flag_wins_over_the_quickstart() -> None:
    args = lm_train.parse(["--quickstart", "--steps", "7"])
    assert (args.steps, args.embedding) == (7, lm_train.QUICKSTART["embedding"])


def test_progress_prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, unit="words", per_step=10, show=True) as progress:
        for value in (3.0, 2.0, 1.0):
            progress.step(torch.tensor(value))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/3  loss 3.0000"
    assert lines[-1].startswith("step 3/3  loss 1.0000")
    assert lines[-1].endswith("words/s")
    assert progress.rate > 0
