"""Words of the language model: a text, encoded once, read as contiguous streams."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.fetch import debian_files, made_once
from examples.text import PROGRAM_BYTES, PROGRAMS, programs, split_words
from parallax.errors import DataError

UNKNOWN = 0
UNKNOWN_WORD = "<unk>"
# The texts are sorted (a dictionary by its headwords, programs by their paths), so what is held
# out is taken in small blocks from everywhere; a tail would be another language.
BLOCK_WORDS = 2_000
HELD_OUT_EVERY = 50

# GCIDE's marks: sources such as [1913 Webster], pronunciations between backslashes, accented
# letters spelled [=a], and braces around cross references.
_SOURCE_MARK = re.compile(r"\[(?:1913 Webster|Webster 1913|WordNet|PJC)[^\]]*\]|\\[^\\\n]*\\")
_ACCENT_MARK = re.compile(r"\[[^\w\]\[]?([A-Za-z]{1,2})[^\w\]\[]?\]")
_BRACKETS = re.compile(r"[\[\]{}]")


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: ``ids[i]`` is the rank of word ``i``, from 1 for the most frequent.

    One encoding serves every vocabulary size, since a smaller vocabulary only cuts off the ranks
    from its size on (``within``).
    """

    ids: np.ndarray  # [words] int32, memory-mapped
    words: tuple[str, ...]  # words[rank]; words[0] stands for all unknown words
    source: str

    def within(self, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids below ``vocab``, for training and held out: both [words] int32."""
        # At least two blocks of a short text, too.
        block = max(1, min(BLOCK_WORDS, len(self.ids) // (2 * HELD_OUT_EVERY)))
        blocks = np.arange(len(self.ids)) // block
        held_out = blocks % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        ids = np.where(self.ids < vocab, self.ids, np.int32(UNKNOWN))
        return torch.from_numpy(ids[~held_out]), torch.from_numpy(ids[held_out])

    def decode(self, ids: torch.Tensor) -> str:
        return " ".join(self.words[int(rank)] for rank in ids)


def load_corpus(text: str, cache: Path, program_bytes: int = PROGRAM_BYTES) -> Corpus:
    """The corpus that ``text`` names, encoded on first use and kept under ``cache``.

    Args:
        text: ``"gcide"`` for the dictionary in Debian's dict-gcide, ``"programs"`` for the text of
            the installed Python packages, ``"auto"`` for the first of these that can be had, or
            the path of a text file.
        cache: directory that keeps the encoded text.
        program_bytes: how much of the installed packages is read.
    """
    if text in ("auto", "gcide", "programs"):
        name = f"text-{text}" + (f"-{program_bytes}" if program_bytes != PROGRAM_BYTES else "")
    else:
        name = f"text-{_fingerprint(Path(text))}"

    def make(target: Path) -> None:
        print(f"preparing the text ({text}) once, for later runs as well ...", flush=True)
        content, source = _read(text, cache, program_bytes)
        ids, words = encode(content)
        target.mkdir()
        np.save(target / "ids.npy", ids)
        (target / "words.txt").write_text("\n".join(words), encoding="utf-8")
        (target / "source.txt").write_text(source, encoding="utf-8")

    folder = made_once(cache / name, make)
    return Corpus(
        ids=np.load(folder / "ids.npy", mmap_mode="r"),
        words=tuple((folder / "words.txt").read_text(encoding="utf-8").split("\n")),
        source=(folder / "source.txt").read_text(encoding="utf-8"),
    )


def encode(content: str) -> tuple[np.ndarray, list[str]]:
    """Ranks of the words of a text, and the words by rank."""
    found = split_words(content)
    words = [UNKNOWN_WORD, *(word for word, _ in Counter(found).most_common())]
    rank = {word: index for index, word in enumerate(words)}
    return np.fromiter((rank[word] for word in found), np.int32, len(found)), words


def streams(
    ids: torch.Tensor, batch: int, unroll: int, shard: int = 0, shards: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of one worker: (words, the words that follow), both [batch, unroll] int64.

    Worker ``shard`` of ``shards`` reads its own contiguous part of the text, as ``batch`` streams
    side by side. All workers get the same number of batches per pass over the text.
    """
    length = batches_per_epoch(ids, batch, unroll, shards) * unroll
    if not length:
        raise DataError(
            f"The text has {len(ids):,} words, too few for one batch of {batch} x {unroll} words "
            f"on each of {shards} workers.",
            hint="use a longer text or a smaller --batch or --unroll.",
        )
    # One word more than the streams' length: the target of the last word.
    begin = torch.arange(batch) * length + shard * batch * length
    while True:
        for step in range(0, length, unroll):
            window = ids[(begin + step)[:, None] + torch.arange(unroll + 1)].long()
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def batches_per_epoch(ids: torch.Tensor, batch: int, unroll: int, shards: int = 1) -> int:
    return (len(ids) - 1) // (batch * unroll * shards)


def _read(text: str, cache: Path, program_bytes: int) -> tuple[str, str]:
    if text in ("auto", "gcide"):
        folder = debian_files("dict-gcide", "usr/share/dictd", cache)
        if folder is not None:
            with gzip.open(folder / "gcide.dict.dz", "rt", encoding="utf-8", errors="replace") as f:
                return _without_marks(f.read()), "GCIDE (Debian dict-gcide)"
        if text == "gcide":
            raise DataError(
                "Debian's package dict-gcide cannot be fetched here.",
                hint='use "--text programs" for the text of the installed Python packages, '
                "or --text FILE.",
            )
    if text in ("auto", "programs"):
        return "\n".join(programs(program_bytes)), PROGRAMS
    return Path(text).read_text(encoding="utf-8", errors="replace"), text


def _without_marks(content: str) -> str:
    content = _SOURCE_MARK.sub("", content)
    return _BRACKETS.sub(" ", _ACCENT_MARK.sub(r"\1", content))


def _fingerprint(file: Path) -> str:
    if not file.is_file() or not file.stat().st_size:
        raise DataError(
            f"--text {file} is no file with text.",
            hint='name a text file, or "gcide", "programs" or "auto".',
        )
    stat = file.stat()
    key = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.sha256(key.encode()).hexdigest()[:16]
