"""The translation example's own parts, in plain PyTorch: pairs, model, evaluation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.nmt import data
from examples.nmt.batches import ByLength, collate
from examples.nmt.model import (
    BEGIN,
    END,
    PADDING,
    UNKNOWN,
    Translator,
    evaluate,
    make_optimizer,
    make_step,
    translate,
    trimmed,
)
from parallax.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")

SENTENCES = (
    ("the red house is old", "das rote haus ist alt"),
    ("the old house is small", "das alte haus ist klein"),
    ("a green car stops here", "hier haelt ein gruenes auto"),
    ("does the small car stop", "haelt das kleine auto"),
    ("who has an old car", "wer hat ein altes auto"),
)

PAGE = """<html><body><div id="DisplayArea"><h1 id="hd_1">{title}</h1>
<p id="par_id3156414" class="paragraph">{first}</p>
<p id="par_id3149807" class="paragraph">{second}</p><p id="search">{other}</p></body></html>"""


@pytest.fixture(scope="module")
def pairs() -> data.Pairs:
    """Functions of a part of the installed packages, which are always there."""
    found = data.docstring_pairs(2_000_000)
    return data.encode(found, "functions", longest=25, vocab=1_500)


# Batches


def test_batches_have_pairs_of_about_one_length(pairs: data.Pairs) -> None:
    batch = 8
    torch.manual_seed(3)
    order = ByLength(pairs.source, pairs.target, batch)
    first, second = list(order), list(order)
    assert sorted(first) == sorted(second) == list(range(len(pairs.source)))
    assert first != second
    torch.manual_seed(3)
    assert list(order) == first
    words, padded, shapes = 0, 0, set()
    for start in range(0, len(first) - batch, batch):
        rows = first[start : start + batch]
        sides = collate([(pairs.source[row], pairs.target[row]) for row in rows])
        words += sum(int((side != PADDING).sum()) for side in sides)
        padded += sum(side.numel() for side in sides)
        shapes.add((sides[0].shape, sides[1].shape))
        assert torch.equal(sides[0], pairs.source[rows][:, : sides[0].shape[1]])
        assert not (pairs.source[rows][:, sides[0].shape[1] :] != PADDING).any()
    whole = (pairs.source != PADDING).sum() + (pairs.target != PADDING).sum()
    all_padded = pairs.source.numel() + pairs.target.numel()
    assert words / padded > 1.2 * float(whole) / all_padded, "less is filled up"
    assert len(shapes) > 10, "of many lengths"


# Pairs


def test_paragraphs_with_the_same_id_are_a_pair(tmp_path: Path) -> None:
    english = {"title": "Save", "first": "Press <b>S</b>ave.", "other": "Search"}
    german = {"title": "Save", "first": "Dr&uuml;cken Sie  <i>Speichern</i>.", "other": "Suche"}
    systems = '<span class="mac">Settings</span><span class="other">Tools</span>'
    for language, texts, second in (("en", english, systems), ("de", german, "Extras")):
        (tmp_path / language / "shared").mkdir(parents=True)
        page = PAGE.format(**texts, second=second)
        (tmp_path / language / "shared" / "01.html").write_text(page, encoding="utf-8")
        (tmp_path / language / "shared" / "02.html").write_text(page, encoding="utf-8")
    (tmp_path / "en" / "alone.html").write_text(PAGE.format(**english, second=""))
    # What comes twice is there once; what is equal or belongs to the page around is left out.
    assert data.help_pairs(tmp_path / "en", tmp_path / "de") == [
        ("Press Save.", "Drücken Sie Speichern."),
        ("Settings Tools", "Extras"),
    ]


def test_functions_are_paired_with_what_they_say() -> None:
    found = list(data.docstring_pairs(1_000_000))
    assert len(found) > 100
    for source, target in found:
        assert source.startswith("def ")
        assert len(source.split()) <= data.FUNCTION_WORDS
        assert target.strip()
        assert "\t" not in source + target
    # The documentation is no part of the source.
    assert not any(target.lower() in source for source, target in found if len(target) > 30)


def test_sentences_become_rows_that_end() -> None:
    texts = [(f"Say word{i} twice.", f"Sage wort{i} zweimal, ja.") for i in range(300)]
    found = data.encode(texts, "test", longest=6, vocab=8)
    assert found.source_words[: UNKNOWN + 1] == ("<pad>", "<unk>")
    assert len(found.source_words) == len(found.target_words) == 8
    assert found.source.shape == (len(found.source), 7)
    assert found.target.shape == (len(found.target), 8)
    assert (found.target[:, 0] == BEGIN).all()
    assert (found.target[:, -1] == END).all(), "the longest sentence has room for its end"
    assert data.decode(found.source[5], found.source_words) == "say <unk> twice ."
    assert found.source[5, 4:].tolist() == [END, PADDING, PADDING]
    assert len(found.held_out_source) == 300 // data.HELD_OUT_EVERY


def test_pairs_with_a_long_side_are_left_out() -> None:
    texts = [(f"short {i}", "kurz" if i % 2 else "sehr viel länger als kurz") for i in range(400)]
    found = data.encode(texts, "test", longest=3, vocab=50)
    assert len(found.source) + len(found.held_out_source) == 200


def test_equal_sources_are_on_one_side(pairs: data.Pairs) -> None:
    twice = [(f"source {i % 200}", f"target {i}") for i in range(400)]
    found = data.encode(twice, "test", longest=5, vocab=500)
    assert len(found.source) + len(found.held_out_source) == 400
    assert not set(map(tuple, found.source.tolist())) & set(
        map(tuple, found.held_out_source.tolist())
    )
    share = len(pairs.held_out_source) / (len(pairs.source) + len(pairs.held_out_source))
    assert 0.005 < share < 0.05


def test_a_file_of_pairs_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"one {i}\teins {i}\n" for i in range(200)), encoding="utf-8")
    found = data.load_pairs(str(file), tmp_path, longest=4, vocab=300)
    assert len(found.source) + len(found.held_out_source) == 200
    assert found.origin == str(file)


def test_a_line_without_a_tab_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("one\teins\ntwo zwei\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"pairs\.tsv: line 2 has 0 tabs") as caught:
        data.load_pairs(str(file), tmp_path, longest=4, vocab=300)
    assert "one tab" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--text .*absent is no file with text") as caught:
        data.load_pairs(str(tmp_path / "absent"), tmp_path, longest=4, vocab=300)
    assert '"docstrings"' in str(caught.value)


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="has 1 pairs, 0 of them of at most 1 words") as caught:
        data.encode([("two words", "zwei wörter")], "test", longest=1, vocab=100)
    assert "--longest" in str(caught.value)


def test_without_debian_the_packages_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="libreoffice-help-en-us and -fr cannot be fetched") as e:
        data.load_pairs("libreoffice-fr", tmp_path / "cache", longest=4, vocab=300)
    assert "--text docstrings" in str(e.value)
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half done is left"


# Model


def small(source: int = 30, target: int = 40, layers: int = 2) -> Translator:
    torch.manual_seed(0)
    return Translator(source, target, embedding=8, hidden=12, layers=layers).double()


SOURCE = torch.tensor([[5, 6, 7, END, PADDING, PADDING], [8, 9, 10, 11, 12, END]])
TARGET = torch.tensor([[BEGIN, 7, 8, END, PADDING], [BEGIN, 9, 10, 11, END]])


def test_the_loss_is_a_mean_over_sentences_of_their_words_losses() -> None:
    model = small()
    logits = model.logits(SOURCE, TARGET[:, :-1]).log_softmax(2)
    expected = 0.0
    for row, sentence in enumerate(TARGET.tolist()):
        for place, (_, wanted) in enumerate(itertools.pairwise(sentence)):
            if wanted != PADDING:
                expected -= float(logits[row, place, wanted].detach())
    assert float(model(SOURCE, TARGET).detach()) == pytest.approx(expected / 2, rel=1e-12)
    alone = [model(SOURCE[i : i + 1], TARGET[i : i + 1]) for i in (0, 1)]
    torch.testing.assert_close(torch.stack(alone).mean(), model(SOURCE, TARGET))


def test_a_word_is_predicted_without_later_words() -> None:
    model = small()
    changed = TARGET.clone()
    changed[:, 3] = 20
    before, after = model.logits(SOURCE, TARGET), model.logits(SOURCE, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


def test_nothing_attends_to_padding() -> None:
    model = small()
    memory, state = model.encode(SOURCE)
    changed = memory.clone()
    changed[0, 4:] += 100.0
    padding = SOURCE == PADDING
    torch.testing.assert_close(
        model.decode(TARGET, memory, padding, state)[0],
        model.decode(TARGET, changed, padding, state)[0],
    )
    changed[0, 3] += 100.0
    found = model.decode(TARGET, changed, padding, state)[0]
    assert not torch.allclose(model.decode(TARGET, memory, padding, state)[0], found)


def test_an_odd_number_of_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden must be even, for two directions, found 7"):
        Translator(10, 10, hidden=7)


def test_perplexity_and_accuracy_are_over_words() -> None:
    model = small()
    scores, wanted = [], []
    for source, target in zip(SOURCE, TARGET, strict=True):  # each without padding
        source, target = source[source != PADDING][None], target[target != PADDING][None]
        scores.append(model.logits(source, target[:, :-1])[0])
        wanted.append(target[0, 1:])
    loss = F.cross_entropy(torch.cat(scores), torch.cat(wanted))
    right = (torch.cat(scores).argmax(1) == torch.cat(wanted)).double().mean()
    found = evaluate(model, SOURCE, TARGET, batch=1)
    assert found[0] == pytest.approx(math.exp(float(loss.detach())), rel=1e-6)
    assert found[1] == pytest.approx(float(right))


def test_the_translator_learns_pairs_by_heart() -> None:
    torch.manual_seed(0)
    pairs = data.encode(SENTENCES, "sentences", longest=25, vocab=100)
    source, target = trimmed(pairs.source), trimmed(pairs.target)
    assert len(source) == len(SENTENCES) - 1  # one is held out
    sizes = len(pairs.source_words), len(pairs.target_words)
    model = Translator(*sizes, embedding=32, hidden=64, layers=1)
    step = make_step(model, make_optimizer(model, "adam", 0.01))
    for _ in range(250):
        step(source, target)
    perplexity, right = evaluate(model, source, target)
    assert perplexity < 1.5
    assert right > 0.95
    found = translate(model, source, longest=26)
    said = [data.decode(row, pairs.target_words) for row in found]
    assert said == [data.decode(row, pairs.target_words) for row in target]
    ends = (found == END).int().argmax(1, keepdim=True)
    assert (found[torch.arange(found.shape[1])[None] > ends] == PADDING).all()


def test_sparse_gradients_train_as_dense_ones_do(pairs: data.Pairs) -> None:
    losses = []
    for sparse in (False, True):
        torch.manual_seed(0)
        sizes = len(pairs.source_words), len(pairs.target_words)
        model = Translator(*sizes, 8, 12, 1, sparse=sparse)
        step = make_step(model, make_optimizer(model, "sgd", 0.2))
        parts = zip(pairs.source[:40].split(8), pairs.target[:40].split(8), strict=True)
        losses.append([float(step(*part).detach()) for part in parts])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
