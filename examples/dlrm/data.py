"""Samples for DLRM: ratings of films, or measurements of cells; 26 tables over either."""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.dlrm.features import Column, coded, cross, listed, ranges
from examples.fetch import chosen, wheel_files
from parallax.errors import DataError

TABLES = 26
HELD_OUT = 0.1
LIKED = 4.0
HISTORY, TITLE_WORDS, GENRES = 5, 6, 4
DAY = 86_400

_RECBOLE, _ML_100K = "recbole==1.2.1", "recbole/dataset_example/ml-100k"


@dataclass(frozen=True)
class Samples:
    """Samples in order, the last ones for testing.

    All tables' ids stand beside each other in one tensor: ``ids.split(lookups, 1)``.
    """

    numbers: torch.Tensor  # [samples, dense features] float32, around zero
    ids: torch.Tensor  # [samples, sum of lookups] int64
    clicks: torch.Tensor  # [samples] float32, 0 or 1
    rows: tuple[int, ...]  # of each table
    lookups: tuple[int, ...]  # of each table, for a sample
    names: tuple[str, ...]  # of the tables
    train: int  # samples before those for testing
    source: str


def load_samples(name: str, cache: Path, rows: int) -> Samples:
    """The samples that ``name`` names.

    Args:
        name: ``"ml-100k"`` for the MovieLens ratings in the Python package recbole, ``"cells"``
            for the breast cancer measurements in scikit-learn, ``"auto"`` for the first of these
            that can be had.
        cache: directory that keeps what is fetched.
        rows: rows of each table of crossed columns, which are hashed to them.

    Raises:
        DataError: the data cannot be had, or ``rows`` is too small.
    """
    if rows < 2:
        raise DataError(
            f"Crossed columns cannot be hashed to {rows} rows.", hint="use --rows 2 or more."
        )
    if name == "auto":
        name = chosen(
            cache / "samples-auto.txt",
            lambda: "cells" if wheel_files(_RECBOLE, _ML_100K, cache) is None else "ml-100k",
        )
    if name == "cells":
        return _cells(rows)
    folder = wheel_files(_RECBOLE, _ML_100K, cache)
    if folder is None:
        raise DataError(
            f"The Python package {_RECBOLE} cannot be fetched here.",
            hint='use "--data cells" for measurements that scikit-learn ships.',
        )
    return _ratings(folder, rows)


def _samples(
    numbers: np.ndarray, columns: list[Column], clicks: np.ndarray, source: str
) -> Samples:
    assert len(columns) == TABLES
    train = round(len(clicks) * (1 - HELD_OUT))
    mean, deviation = numbers[:train].mean(0), numbers[:train].std(0)
    return Samples(
        torch.from_numpy((numbers - mean) / np.maximum(deviation, 1e-6)).float(),
        torch.from_numpy(np.concatenate([column.ids for column in columns], 1)),
        torch.from_numpy(clicks).float(),
        tuple(column.rows for column in columns),
        tuple(column.ids.shape[1] for column in columns),
        tuple(column.name for column in columns),
        train,
        source,
    )


def _ratings(folder: Path, rows: int) -> Samples:
    """Ratings in the order of time: whether a user likes a film, from what was known before."""
    ratings = sorted(
        (float(row[3]), row[0], row[1], float(row[2])) for row in _table(folder / "ml-100k.inter")
    )
    users = {row[0]: row[1:] for row in _table(folder / "ml-100k.user")}
    films = {row[0]: row[1:] for row in _table(folder / "ml-100k.item")}
    time = np.array([rating[0] for rating in ratings])
    liked = np.array([rating[3] >= LIKED for rating in ratings])
    who = [users[rating[1]] for rating in ratings]
    what = [films[rating[2]] for rating in ratings]
    age = np.array([float(person[0]) for person in who])
    year = np.array([float(film[1]) if film[1].isdigit() else 0.0 for film in what])
    numbers, likes, dislikes = _before(
        ratings, age, np.where(year > 0, year, year[year > 0].mean())
    )

    user = coded("user", np.array([rating[1] for rating in ratings]))
    film = coded("film", np.array([rating[2] for rating in ratings]))
    sex = coded("sex", np.array([person[1] for person in who]))
    job = coded("occupation", np.array([person[2] for person in who]))
    post = coded("post code", np.array([person[3] for person in who]))
    region = coded("region", np.array([person[3][:2] for person in who]))
    ages = ranges("age", age, 8)
    years = coded("year", year)
    genres = listed("genres", [film[2].split() for film in what], GENRES)
    title = listed("title", [film[0].lower().split() for film in what], TITLE_WORDS)
    hour = coded("hour", time // 3600 % 24)
    weekday = coded("weekday", time // DAY % 7)
    month = coded("month", time // (30 * DAY))
    liked_before = listed("films liked before", likes, HISTORY)
    disliked_before = listed("films disliked before", dislikes, HISTORY)
    columns = [
        *(user, film, sex, job, post, region, ages, years, genres, title, hour, weekday, month),
        *(liked_before, disliked_before),
        cross(user, genres, rows),
        cross(user, years, rows),
        cross(user, hour, rows),
        cross(film, sex, rows),
        cross(film, ages, rows),
        cross(film, job, rows),
        cross(film, region, rows),
        cross(film, liked_before, rows),
        cross(film, disliked_before, rows),
        cross(ages, genres, rows),
        cross(job, genres, rows),
    ]
    return _samples(numbers, columns, liked, f"MovieLens 100k ({_RECBOLE})")


def _before(
    ratings: list[tuple[float, str, str, float]], age: np.ndarray, year: np.ndarray
) -> tuple[np.ndarray, list[list[str]], list[list[str]]]:
    """Numbers of each rating, and the films that its user liked and disliked last before it.

    Everything is counted before the rating itself: a model must not see what it predicts.
    """
    numbers, likes, dislikes = [], [], []
    # Ratings, their sum, the time of the first and lists of films, for users and for films.
    seen: dict[tuple[str, str], tuple[int, float, float, list[str], list[str]]] = {}
    for when, user, film, rating in ratings:
        found = []
        for key in (("user", user), ("film", film)):
            count, total, first, *_ = seen.get(key, (0, 0.0, when, [], []))
            # One rating of 3.5 is taken as given, so that few ratings do not say much.
            found += [np.log1p(count), (total + 3.5) / (count + 1), np.log1p((when - first) / DAY)]
        numbers.append(found)
        _, _, _, liked, disliked = seen.get(("user", user), (0, 0.0, when, [], []))
        likes.append(liked)
        dislikes.append(disliked)
        for key in (("user", user), ("film", film)):
            count, total, first, liked, disliked = seen.get(key, (0, 0.0, when, [], []))
            if rating >= LIKED:
                liked = [film, *liked][:HISTORY]
            else:
                disliked = [film, *disliked][:HISTORY]
            seen[key] = (count + 1, total + rating, first, liked, disliked)
    return np.column_stack([age, year, np.array(numbers)]), likes, dislikes


def _table(file: Path) -> list[list[str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]


def _cells(rows: int) -> Samples:
    """Measurements of cell nuclei: whether a tumour is benign."""
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        raise DataError(
            "There is neither MovieLens nor scikit-learn here.",
            hint='pip install "parallax[examples]" brings scikit-learn and its data.',
        ) from error
    data = load_breast_cancer()
    names = [name.replace(" ", "-") for name in data.feature_names]
    cut = [ranges(name, data.data[:, i], 8) for i, name in enumerate(names[:14])]
    crossed = [cross(a, b, rows) for a, b in itertools.pairwise(cut)][: TABLES - len(cut)]
    # The samples are in no particular order.
    return _samples(data.data, [*cut, *crossed], data.target, "scikit-learn breast cancer")
