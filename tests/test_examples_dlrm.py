"""The recommendation example's own parts, in plain PyTorch: features, samples, model."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.dlrm import data, features
from examples.dlrm.model import DLRM, make_optimizer, make_step, predict
from examples.fetch import wheel_files
from parallax.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")

RATINGS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
u1\tf2\t2\t200
u1\tf1\t5\t100
u2\tf1\t4\t300
u1\tf3\t5\t400
"""
USERS = """user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token
u1\t24\tM\twriter\t85711
u2\t53\tF\tother\tV3N4P
"""
FILMS = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
f1\tToy Story\t1995\tAnimation Comedy
f2\tGoldenEye\t1995\tAction
f3\t"Unknown" film\tunkonwn\tunknown
"""


@pytest.fixture
def films(tmp_path: Path) -> Path:
    for name, content in (("inter", RATINGS), ("user", USERS), ("item", FILMS)):
        (tmp_path / f"ml-100k.{name}").write_text(content, encoding="utf-8")
    return tmp_path


# Features


def test_each_value_has_an_id_of_its_own() -> None:
    column = features.coded("letter", np.array(["b", "a", "b", "c"]))
    assert column.ids.tolist() == [[2], [1], [2], [3]]
    assert column.rows == 4, "0 stays free"


def test_lists_are_cut_and_filled() -> None:
    column = features.listed("words", [["x", "y", "z"], [], ["z"]], 2)
    assert column.ids.tolist() == [[1, 2], [features.NONE] * 2, [3, features.NONE]]
    assert column.rows == 4


def test_ranges_hold_equally_many() -> None:
    column = features.ranges("number", np.arange(80.0) ** 3, 4)
    assert np.bincount(column.ids[:, 0]).tolist() == [0, 20, 20, 20, 20]


def test_crossed_values_spread_over_the_rows() -> None:
    left = features.coded("left", np.repeat(np.arange(100), 200))
    right = features.coded("right", np.tile(np.arange(200), 100))
    column = features.cross(left, right, 1_001)
    assert (column.name, column.rows) == ("left x right", 1_001)
    counts = np.bincount(column.ids[:, 0], minlength=1_001)
    assert counts[features.NONE] == 0
    # 20,000 pairs on 1,000 rows: 20 each, five standard deviations of a random hash.
    assert counts[1:].max() < 20 + 5 * 20**0.5
    assert counts[1:].min() > 0
    again = features.cross(left, right, 1_001)
    assert np.array_equal(again.ids, column.ids)
    assert not np.array_equal(features.cross(right, left, 1_001).ids, column.ids)


def test_a_missing_value_crosses_to_the_missing_row() -> None:
    left = features.listed("left", [["a", "b"], ["a"]], 2)
    right = features.coded("right", np.array([1, 2]))
    ids = features.cross(left, right, 50).ids
    assert ids.shape == (2, 2)
    assert ids[1, 1] == features.NONE
    assert (ids[[0, 0, 1], [0, 1, 0]] != features.NONE).all()


# Samples


def test_ratings_are_described_by_what_was_before_them(films: Path) -> None:
    found = data._ratings(films, rows=100)
    assert found.clicks.tolist() == [1, 0, 1, 1], "in the order of time"
    names = dict(zip(found.names, found.ids.split(found.lookups, 1), strict=True))
    liked, disliked = names["films liked before"], names["films disliked before"]
    assert (liked != features.NONE).sum(1).tolist() == [0, 1, 0, 1]
    assert (disliked != features.NONE).sum(1).tolist() == [0, 0, 0, 1]
    # The film of a rating is never among the earlier ones by the rating itself.
    ratings = [(1.0, "u", "f", 5.0), (2.0, "u", "g", 1.0)]
    numbers, likes, dislikes = data._before(ratings, np.array([30.0] * 2), np.array([1990.0] * 2))
    assert likes == [[], ["f"]]
    assert dislikes == [[], []]
    assert numbers[:, 2].tolist() == pytest.approx([0.0, np.log(2)])  # ratings of the user before
    assert numbers[:, 3].tolist() == pytest.approx([3.5, (3.5 + 5) / 2])


def test_a_later_rating_changes_nothing_before_it(films: Path) -> None:
    before = data._ratings(films, rows=100)
    changed = RATINGS.replace("u1\tf3\t5\t400", "u1\tf3\t1\t400")
    (films / "ml-100k.inter").write_text(changed, encoding="utf-8")
    after = data._ratings(films, rows=100)
    assert torch.equal(before.ids, after.ids)
    assert torch.equal(before.numbers, after.numbers)
    assert before.clicks.tolist() != after.clicks.tolist()


def test_the_cells_have_26_tables(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    found = data.load_samples("cells", tmp_path, rows=500)
    assert len(found.rows) == len(found.lookups) == len(set(found.names)) == data.TABLES
    assert len(found.numbers) == len(found.ids) == len(found.clicks) == 569
    for rows, ids in zip(found.rows, found.ids.split(found.lookups, 1), strict=True):
        assert int(ids.min()) >= 0
        assert int(ids.max()) < rows
    train = found.numbers[: found.train]
    torch.testing.assert_close(train.mean(0), torch.zeros(30), atol=1e-5, rtol=0)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be hashed to 1 rows") as caught:
        data.load_samples("cells", tmp_path, rows=1)
    assert "--rows 2" in str(caught.value)


def test_what_cannot_be_fetched_is_refused_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match=r"recbole==1\.2\.1 cannot be fetched") as caught:
        data.load_samples("ml-100k", tmp_path, rows=100)
    assert "--data cells" in str(caught.value)
    assert data.load_samples("auto", tmp_path, rows=100).source == "scikit-learn breast cancer"
    assert [file.name for file in tmp_path.iterdir()] == ["samples-auto.txt"]


def test_another_worker_takes_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "samples-auto.txt").write_text("cells")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert data.load_samples("auto", tmp_path, rows=100).source == "scikit-learn breast cancer"


def test_a_part_of_a_wheel_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    info = "demo-1.0.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(tmp_path / "demo-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("demo/data/a.txt", "content")
        wheel.writestr("demo/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    cache = tmp_path / "cache"
    folder = wheel_files("demo==1.0", "demo/data", cache)
    assert folder is not None
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert files == [folder / "a.txt"]
    assert wheel_files("demo==2.0", "demo/data", cache) is None


# Model


def test_all_pairs_of_vectors_meet_once() -> None:
    torch.manual_seed(0)
    model = DLRM(3, [10, 20], features=4, bottom=[5], top=[6]).double()
    numbers = torch.randn(2, 3, dtype=torch.float64)
    ids = [torch.tensor([[1, 2], [3, 3]]), torch.tensor([[4], [19]])]
    for row in range(2):
        vectors = [model.bottom(numbers[row]).relu()]
        vectors += [
            table.weight[wanted[row]].sum(0)
            for table, wanted in zip(model.tables, ids, strict=True)
        ]
        products = [vectors[i] @ vectors[j] for i, j in ((1, 0), (2, 0), (2, 1))]
        expected = model.top(torch.cat([vectors[0], torch.stack(products)]))
        torch.testing.assert_close(model(numbers, ids)[row], expected[0])


def test_offsets_say_where_bags_begin() -> None:
    torch.manual_seed(0)
    model = DLRM(3, [10, 20], features=4, bottom=[5], top=[6])
    numbers = torch.randn(3, 3)
    ids = [torch.randint(10, (3, 4)), torch.randint(20, (3, 1))]
    offsets = [torch.arange(0, 12, 4), torch.arange(3)]
    flat = model(numbers, [wanted.flatten() for wanted in ids], offsets)
    torch.testing.assert_close(flat, model(numbers, ids))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_benign_cells_are_told_from_others(optimizer: str, tmp_path: Path) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    from examples.dlrm.train import DEFAULT_LR

    torch.manual_seed(0)
    samples = data.load_samples("cells", tmp_path, rows=200)
    model = DLRM(30, samples.rows, 8, [32], [32])
    step = make_step(model, make_optimizer(model, optimizer, DEFAULT_LR[optimizer]))
    ids = samples.ids.split(samples.lookups, 1)
    for batch in torch.arange(samples.train).repeat(6).split(32):
        step(samples.numbers[batch], [wanted[batch] for wanted in ids], samples.clicks[batch])
    test = slice(samples.train, None)
    odds = predict(model, samples.numbers[test], [wanted[test] for wanted in ids], batch=20)
    assert len(odds) == 57
    assert metrics.roc_auc_score(samples.clicks[test], odds) > 0.95
