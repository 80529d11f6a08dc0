"""Splitting, cleaning and cutting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import CorpusConfig
from gnnlm.corpus.build import build_corpus, even_length, split_documents
from gnnlm.corpus.document import Document
from gnnlm.corpus.overlap import Overlap, SeenText, paragraphs
from gnnlm.corpus.stream import END, Stream
from gnnlm.corpus.windows import plan_windows, window_start
from gnnlm.errors import CorpusError


class Characters:
    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        return [ord(c) % 100 for c in text], list(range(len(text)))


def build(folder: Path, **config: Any) -> Artifact:
    with Draft(folder / "corpus", "corpus", {}) as draft:
        return build_corpus(draft, CorpusConfig(**config), seed=0, lm=lambda: (Characters(), 100))


@given(tokens=st.integers(0, 60), window=st.integers(2, 20), context=st.integers(0, 19))
def test_each_position_is_kept_once_with_enough_before_it(tokens: int, window: int, context: int) -> None:
    context = min(context, window - 1)
    windows = plan_windows(tokens, window, context)
    kept = [p for w in windows for p in range(w.first, w.stop + 1)]
    assert kept == list(range(tokens + 1))
    for w in windows:
        assert w.stop - w.start + 1 <= window
        assert all(p - w.start >= min(context, p) for p in range(w.first, w.stop + 1))
        assert all(window_start(p, window, context) == w.start for p in range(w.first, w.stop + 1))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), window=st.integers(2, 20), context=st.integers(0, 19)
)
def test_windows_of_whole_lines(lengths: list[int], window: int, context: int) -> None:
    context = min(context, window - 1)
    ends = np.cumsum(lengths)
    tokens = int(ends[-1])
    windows = plan_windows(tokens, window, context, ends)
    assert [p for w in windows for p in range(w.first, w.stop + 1)] == list(range(tokens + 1))
    for w in windows:
        assert w.stop - w.start + 1 <= window
        room = w.start + window - 1
        fits = [e for e in ends if w.first < e <= room + 1]
        if w.stop < tokens and fits:
            assert w.stop + 1 == fits[-1]  # the last token scored ends the last line that fits


def test_split_is_by_document_and_stable() -> None:
    documents = [Document(f"d{i}", "text") for i in range(20)]
    config = CorpusConfig(valid_share=0.2, test_share=0.1)
    split = split_documents(documents, config, seed=0)
    assert {name: len(docs) for name, docs in split.items()} == {"train": 14, "valid": 4, "test": 2}
    assert split == split_documents(documents[::-1], config, seed=0)
    assert split != split_documents(documents, config, seed=1)
    assert sorted(d.name for docs in split.values() for d in docs) == sorted(d.name for d in documents)
    with pytest.raises(CorpusError, match="2 document"):
        split_documents(documents[:2], config, seed=0)


def write_lengths(folder: Path, lengths: list[int]) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        (folder / f"{number:03d}.txt").write_text("".join(rng.choice(list("abcdefgh"), length)))
    return folder


def test_documents_share_a_limit(tmp_path: Path) -> None:
    """No long document fills a split alone: the first documents of it are cut to one length."""
    lengths = [10, 50, 1000, 1000, 40]
    held = str(write_lengths(tmp_path / "held", lengths))
    train = str(write_lengths(tmp_path / "train", [300] * 3))
    config = {"source": None, "train": train, "valid": held, "test": held, "overlap": "skip", "max_test_tokens": 200}
    made = build(tmp_path / "run", **config)
    assert np.diff(Stream(made, "test").starts).tolist() == [11, 51, 51, 51, 41]
    assert made.facts["test"]["cut_to"] == 50
    assert "cut_to" not in made.facts["valid"]
    assert Stream(made, "valid").token_count == sum(lengths)
    whole = build(tmp_path / "whole", **config, min_documents=1)
    assert np.diff(Stream(whole, "test").starts).tolist() == [11, 51, 141]
    assert "cut_to" not in whole.facts["test"]
    pair = build(tmp_path / "pair", **config, min_documents=2)  # the first two fit, and the third is cut
    assert np.diff(Stream(pair, "test").starts).tolist() == [11, 51, 141]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), limit=st.integers(1, 200))
def test_even_length_is_the_least_that_fills_the_limit(lengths: list[int], limit: int) -> None:
    limit = min(limit, sum(lengths))
    length = even_length(lengths, limit)
    assert sum(min(n, length) for n in lengths) >= limit
    assert sum(min(n, length - 1) for n in lengths) < limit


def test_paragraph_goes_when_half_of_its_ngrams_are_known() -> None:
    seen = SeenText(3)
    seen.add("a b c d e f")  # abc bcd cde def
    overlap = Overlap()
    text = "a b c d x y\n\nx y z\n\na b c x y\n\na b"
    # abc bcd | cdx dxy: half is known, goes; xyz stays; abc | bcx cxy: a third, stays; too short for a 3-gram, stays
    assert seen.clean(text, 0.5, overlap) == "x y z\n\na b c x y\n\na b"
    assert (overlap.paragraphs, overlap.repeated_paragraphs, overlap.repeated_words) == (4, 1, 6)


@given(st.text(alphabet="ab \n", max_size=40))
def test_cleaning_nothing_changes_nothing(text: str) -> None:
    assert SeenText(2).clean(text, 0.5, Overlap()) == text
    assert all(p.strip() for p in paragraphs(text))


def test_test_text_that_stands_in_train_is_dropped(tmp_path: Path) -> None:
    for split, text in {
        "train": "the quick brown fox jumps over the lazy dog again",
        "valid": "something else entirely that nobody wrote before",
        "test": "the quick, brown fox jumps over the lazy dog again!\n\nfresh words that only this split has to show",
    }.items():
        (tmp_path / f"{split}.txt").write_text(text)
    paths = {split: str(tmp_path / f"{split}.txt") for split in ("train", "valid", "test")}
    made = build(tmp_path, source=None, **paths)
    stream = Stream(made, "test")
    assert stream.documents[0].text == "fresh words that only this split has to show"
    assert made.facts["test"]["overlap"]["repeated_paragraphs"] == 1
    assert made.facts["test"]["overlap"]["remaining_ngram_overlap"] == 0
    assert stream.tokens[-1] == END
    assert len(stream) == stream.token_count + 1


def test_short_lines_that_stand_in_train_are_told(tmp_path: Path, logged: Callable[[], str]) -> None:
    poem = "\n\n".join(f"roses are red number {i}" for i in range(20))
    (tmp_path / "a.txt").write_text(poem)
    (tmp_path / "b.txt").write_text("one two three")
    paths = {"train": str(tmp_path / "a.txt"), "valid": str(tmp_path / "b.txt"), "test": str(tmp_path / "a.txt")}
    made = build(tmp_path, source=None, **paths)
    assert made.facts["test"]["overlap"]["remaining_short_overlap"] == 1
    assert made.facts["valid"]["overlap"]["remaining_short_overlap"] == 0
    assert "100% of the test split still appears in earlier text" in logged()


def test_a_test_split_that_is_all_train_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog again")
    path = str(tmp_path / "a.txt")
    with pytest.raises(CorpusError, match="valid split has no text left"):
        build(tmp_path, source=None, train=path, valid=path, test=path)


def test_budgets_and_offsets(tmp_path: Path, text_dir: Path) -> None:
    made = build(tmp_path, source=str(text_dir), max_train_tokens=1500, max_document_tokens=400)
    train = Stream(made, "train")
    assert train.token_count == 1500
    lengths = train.starts[1:] - train.starts[:-1] - 1
    assert lengths.max() == 400
    for number, document in enumerate(train.documents):
        start, end = int(train.starts[number]), int(train.starts[number + 1]) - 1
        assert train.text_between(start, end) == document.text
        original = (text_dir / document.name).read_text()
        assert original.startswith(document.text)
    place = train.passage(int(train.starts[1]) + 5, left=3, right=2)
    assert place.before + place.token + place.after == train.documents[1].text[2:8]
