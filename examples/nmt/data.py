"""Pairs of sentences for translation: aligned help texts, or functions and what they say."""

from __future__ import annotations

import ast
import hashlib
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.fetch import debian_files, made_once
from examples.nmt.model import BEGIN, END, PADDING, SPECIAL_WORDS, UNKNOWN
from examples.text import PROGRAMS, programs, split_words
from parallax.errors import DataError

TEXTS = ("libreoffice-de", "libreoffice-fr", "docstrings")
HELD_OUT_EVERY = 50
PROGRAM_BYTES = 30_000_000
# Signature and first words of the body: about as long as what is said about it.
FUNCTION_WORDS = 24

_PARAGRAPH = re.compile(r'<(p|h[1-6]|div|td|li)\b[^>]*\bid="([^"]+)"[^>]*>(.*?)</\1>', re.S)
# Paragraphs of the help; other elements with an id belong to the page around it.
_HELP_ID = re.compile(r"(par|hd|tit|bm|N)|.*\d{5}")
# Names for several systems follow each other in spans; other marks stand inside words.
_SPAN = re.compile(r"</?span\b[^>]*>")
_MARK = re.compile(r"<[^>]+>")

TextPair = tuple[str, str]


@dataclass(frozen=True)
class Pairs:
    """Sentences as ids: rows that end in ``END`` and ``PADDING``; targets begin with ``BEGIN``."""

    source: torch.Tensor  # [pairs, longest + 1] int64
    target: torch.Tensor  # [pairs, longest + 2] int64
    held_out_source: torch.Tensor
    held_out_target: torch.Tensor
    source_words: tuple[str, ...]  # words by id; the first are ``SPECIAL_WORDS``
    target_words: tuple[str, ...]
    origin: str


def load_pairs(text: str, cache: Path, *, longest: int, vocab: int) -> Pairs:
    """The pairs that ``text`` names, prepared on first use and kept under ``cache``.

    Args:
        text: ``"libreoffice-de"`` or ``"libreoffice-fr"`` for the help of LibreOffice in English
            and German or French, ``"docstrings"`` for the functions of the installed Python
            packages and what their documentation says first, ``"auto"`` for the first of these
            that can be had, or the path of a file with a source, a tab and a target a line.
        cache: directory that keeps what is fetched and prepared.
        longest: words of a sentence; pairs with a longer one are left out.
        vocab: most frequent words of each language, with ``SPECIAL_WORDS``; others are unknown.

    Raises:
        DataError: the text cannot be had, or no pairs are left to train on or to hold out.
    """
    if text in (*TEXTS, "auto"):

        def make(target: Path) -> None:
            print(f"preparing the pairs ({text}) once, for later runs as well ...", flush=True)
            pairs, origin = _read(text, cache)
            lines = [origin, *("\t".join(pair) for pair in pairs)]
            target.write_text("\n".join(lines), encoding="utf-8")

        content = made_once(cache / f"pairs-{text}.tsv", make).read_text(encoding="utf-8")
        origin, _, content = content.partition("\n")
    else:
        origin, content = text, _file(Path(text))
    return encode(_pairs_of(content, origin), origin, longest=longest, vocab=vocab)


def encode(pairs: Iterable[TextPair], origin: str, *, longest: int, vocab: int) -> Pairs:
    """Pairs of texts as ids; one of ``HELD_OUT_EVERY`` sources is held out."""
    split = [(split_words(source), split_words(target)) for source, target in pairs]
    kept = [pair for pair in split if all(0 < len(side) <= longest for side in pair)]
    # By content, so that a source that comes twice is not on both sides.
    scattered = sorted({" ".join(source) for source, _ in kept}, key=_scatter)
    held_out = set(scattered[: max(1, len(scattered) // HELD_OUT_EVERY)])
    train = [pair for pair in kept if " ".join(pair[0]) not in held_out]
    test = [pair for pair in kept if " ".join(pair[0]) in held_out]
    if not train or not test:
        raise DataError(
            f"{origin} has {len(split)} pairs, {len(kept)} of them of at most {longest} words: "
            f"{len(train)} to train on and {len(test)} to hold out.",
            hint="use a longer text, or a larger --longest.",
        )
    sources = _vocabulary((source for source, _ in train), vocab)
    targets = _vocabulary((target for _, target in train), vocab)
    return Pairs(
        *(_rows([s for s, _ in train], sources, longest), _targets(train, targets, longest)),
        *(_rows([s for s, _ in test], sources, longest), _targets(test, targets, longest)),
        tuple(sources),
        tuple(targets),
        origin,
    )


def decode(ids: torch.Tensor, words: Sequence[str]) -> str:
    """The words of one sentence, without what begins, ends and fills it."""
    return " ".join(words[i] for i in ids.tolist() if i not in (PADDING, BEGIN, END))


def _scatter(sentence: str) -> bytes:
    """A key that sorts sentences in no order of theirs, and in the same one everywhere."""
    return hashlib.blake2b(sentence.encode(), digest_size=8).digest()


def _vocabulary(sentences: Iterable[list[str]], limit: int) -> dict[str, int]:
    counts = Counter(word for sentence in sentences for word in sentence)
    frequent = [word for word, _ in counts.most_common(max(0, limit - len(SPECIAL_WORDS)))]
    return {word: rank for rank, word in enumerate([*SPECIAL_WORDS, *frequent])}


def _rows(sentences: list[list[str]], ids: dict[str, int], longest: int) -> torch.Tensor:
    rows = torch.full((len(sentences), longest + 1), PADDING)
    for row, sentence in zip(rows, sentences, strict=True):
        found = [*(ids.get(word, UNKNOWN) for word in sentence), END]
        row[: len(found)] = torch.tensor(found)
    return rows


def _targets(
    pairs: list[tuple[list[str], list[str]]], ids: dict[str, int], longest: int
) -> torch.Tensor:
    rows = _rows([target for _, target in pairs], ids, longest)
    return torch.cat([torch.full((len(rows), 1), BEGIN), rows], 1)


def _pairs_of(content: str, origin: str) -> Iterator[TextPair]:
    for number, line in enumerate(content.splitlines(), 1):
        sides = line.split("\t")
        if len(sides) != 2:
            raise DataError(
                f"{origin}: line {number} has {len(sides) - 1} tabs.",
                hint="each line has a source, one tab and a target.",
            )
        yield sides[0], sides[1]


def _file(file: Path) -> str:
    if not file.is_file() or not file.stat().st_size:
        names = ", ".join(f'"{name}"' for name in TEXTS)
        raise DataError(
            f"--text {file} is no file with text.", hint=f'name a file, {names} or "auto".'
        )
    return file.read_text(encoding="utf-8", errors="replace")


def _read(text: str, cache: Path) -> tuple[list[TextPair], str]:
    if text != "docstrings":
        language = "de" if text == "auto" else text.removeprefix("libreoffice-")
        sides = [
            debian_files(f"libreoffice-help-{package}", f"usr/share/libreoffice/help/{lang}", cache)
            for package, lang in (("en-us", "en-US"), (language, language))
        ]
        if sides[0] is not None and sides[1] is not None:
            origin = f"LibreOffice help, en-{language} (Debian libreoffice-help-{language})"
            return help_pairs(sides[0] / "text", sides[1] / "text"), origin
        if text != "auto":
            raise DataError(
                f"Debian's packages libreoffice-help-en-us and -{language} cannot be fetched here.",
                hint='use "--text docstrings" for the installed Python packages, or --text FILE.',
            )
    return list(dict.fromkeys(docstring_pairs(PROGRAM_BYTES))), f"functions of {PROGRAMS}"


def help_pairs(left: Path, right: Path) -> list[TextPair]:
    """Paragraphs with the same id in files of the same name, each pair once."""
    found: dict[TextPair, None] = {}
    for file in sorted(left.rglob("*.html")):
        other = right / file.relative_to(left)
        if other.exists():
            sources, targets = _paragraphs(file), _paragraphs(other)
            for name, source in sources.items():
                target = targets.get(name)
                # What is equal was not translated.
                if source and target and source != target:
                    found[source, target] = None
    return list(found)


def _paragraphs(file: Path) -> dict[str, str]:
    content = file.read_text(encoding="utf-8")
    return {
        match[2]: " ".join(html.unescape(_MARK.sub("", _SPAN.sub(" ", match[3]))).split())
        for match in _PARAGRAPH.finditer(content)
        if _HELP_ID.match(match[2])
    }


def docstring_pairs(limit: int) -> Iterator[TextPair]:
    """Functions, and the first line of their documentation, of ``limit`` characters of programs."""
    for content in programs(limit):
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError):
            continue  # Some packages have files for other versions of Python.
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                said = (ast.get_docstring(node) or "").strip().split("\n")[0]
                if said:
                    node.body = node.body[1:]
                    node.decorator_list = []
                    words = split_words(ast.unparse(node).replace("_", " "))[:FUNCTION_WORDS]
                    yield " ".join(words), " ".join(said.split())
