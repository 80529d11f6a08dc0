"""Benchmarks in their official formats, on tiny files; vocabularies; datasets."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import CorpusConfig, parse_config
from gnnlm.corpus import benchmarks, hub
from gnnlm.corpus.benchmarks import BENCHMARKS, Benchmark, read_benchmark
from gnnlm.corpus.build import build_corpus, read_splits, text_fingerprint
from gnnlm.corpus.stream import END, Stream
from gnnlm.corpus.vocabulary import ByteVocabulary, WordVocabulary, cut_words, load_vocabulary
from gnnlm.errors import ConfigError, CorpusError, ModelError

ARTICLES = """ 
 = Robert <unk> = 
 
 Robert is an actor . 
 = = Career = = 
 He had a role . 
 
 = Manila = 
 
 Tourism is vital . 
"""


def build(folder: Path, **config: Any) -> Artifact:
    def no_lm() -> Any:
        raise AssertionError("the base model is not asked")

    with Draft(folder / "corpus", "corpus", {}) as draft:
        return build_corpus(draft, CorpusConfig(**config), seed=0, lm=no_lm)


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A WikiText-2 of three tiny files, and what is published of it changed to fit."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(ARTICLES)
    tokens = len(ARTICLES.split()) + ARTICLES.count("\n")
    words = len(set(ARTICLES.split())) + 1
    small = Benchmark("wikitext-2", "words", tokens=(tokens, tokens, tokens), vocabulary=words)
    monkeypatch.setitem(BENCHMARKS, "wikitext-2", small)
    return tmp_path


def test_wikitext(wikitext: Path, tmp_path: Path) -> None:
    made = build(tmp_path, source="wikitext-2", data_dir=str(wikitext), tokens="words")
    vocabulary = load_vocabulary(made.path)
    assert isinstance(vocabulary, WordVocabulary)
    stream = Stream(made, "train")
    assert [d.name for d in stream.documents] == ["Robert <unk>", "Manila"]
    tokens = np.asarray(stream.tokens)
    assert stream.token_count == len(ARTICLES.split()) + ARTICLES.count("\n") == made.facts["train"]["tokens"]
    words = [vocabulary.piece(t) for t in tokens if t != END]
    assert words == [w for line in ARTICLES.splitlines() for w in (*line.split(), "<eos>")]
    assert made.facts["vocabulary"] == {"kind": "words", "size": len(vocabulary)}
    assert made.facts["test"]["overlap"] is None  # the splits are as published, though these are all alike


def test_wikitext_that_is_not_is_refused(wikitext: Path, tmp_path: Path) -> None:
    with (wikitext / "wiki.valid.tokens").open("a") as file:
        file.write("more\n")
    with pytest.raises(CorpusError, match=r"this is not wikitext-2: expected 36 tokens, .* valid split \(got 38\)"):
        read_benchmark("wikitext-2", wikitext)
    (wikitext / "wiki.valid.tokens").unlink()
    with pytest.raises(CorpusError, match=r"holds no wiki.valid.tokens"):
        read_benchmark("wikitext-2", wikitext)


def test_vocabulary_that_is_not_is_refused(wikitext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Benchmark("wikitext-2", "words", tokens=BENCHMARKS["wikitext-2"].tokens, vocabulary=99)
    monkeypatch.setitem(BENCHMARKS, "wikitext-2", other)
    with pytest.raises(CorpusError, match="expected a vocabulary of 99 words"):
        build(tmp_path, source="wikitext-2", data_dir=str(wikitext), tokens="words")
    # a slice may differ
    build(tmp_path, source="wikitext-2", data_dir=str(wikitext), tokens="words", max_train_tokens=12)


def test_files_of_your_own_are_read_in_a_benchmarks_way(wikitext: Path, tmp_path: Path) -> None:
    (wikitext / "mine.txt").write_text(" = One = \n\n a b \n")
    files = {split: "mine.txt" for split in ("train", "valid", "test")}
    made = build(tmp_path, source="wikitext-2", data_dir=str(wikitext), tokens="words", **files)
    assert made.facts["train"]["tokens"] == 8


def test_one_billion_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = tmp_path / "training-monolingual.tokenized.shuffled"
    heldout = tmp_path / "heldout-monolingual.tokenized.shuffled"
    for folder in (train, heldout):
        folder.mkdir()
    for number in range(1, 100):
        (train / f"news.en-{number:05d}-of-00100").write_text("a b a\nc b a\n")
    (heldout / "news.en-00000-of-00100").write_text("a z\nb c a\nb\n")  # the whole held-out set, not a shard of train
    (heldout / "news.en.heldout-00000-of-00050").write_text("a z\n")
    (heldout / "news.en.heldout-00001-of-00050").write_text("b c a\nb\n")
    monkeypatch.setitem(
        BENCHMARKS,
        "one-billion-word",
        Benchmark("one-billion-word", "words", (792, 6, 3), 5, min_count=3, sentences=(198, 2, 1)),
    )
    made = build(tmp_path, source="one-billion-word", data_dir=str(tmp_path), tokens="words", min_count=3)
    stream = Stream(made, "test")
    assert (made.facts["train"]["documents"], made.facts["valid"]["documents"]) == (198, 2)
    vocabulary = load_vocabulary(made.path)
    assert vocabulary is not None
    assert [vocabulary.piece(t) for t in np.asarray(stream.tokens)[:-1]] == ["a", "<unk>", "<eos>"]
    monkeypatch.undo()
    with pytest.raises(CorpusError, match="798,949,912 tokens"):
        read_benchmark("one-billion-word", tmp_path)
    (heldout / "news.en.heldout-00000-of-00050").unlink()
    with pytest.raises(CorpusError, match="is not One Billion Word"):
        read_benchmark("one-billion-word", tmp_path)


def test_one_billion_word_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its test split holds all held-out shards; the first is our test, the second our valid."""
    datasets = pytest.importorskip("datasets")
    rows = {"train": ["a b", "c"], "test": ["t one", "v one", "v two", "more"]}

    def load(name: str, configuration: str, split: str, converted: bool) -> Any:
        assert (name, configuration, converted) == ("billion-word-benchmark/lm1b", "plain_text", True)
        return datasets.Dataset.from_dict({"text": rows[split]})

    monkeypatch.setattr(hub, "load_split", load)
    published = Benchmark("one-billion-word", "words", (5, 6, 3), 5, min_count=3, sentences=(2, 2, 1))
    monkeypatch.setitem(BENCHMARKS, "one-billion-word", published)
    made = read_benchmark("one-billion-word", None)
    assert {split: [d.text for d in documents] for split, documents in made.items()} == {
        "train": ["a b", "c"],
        "valid": ["v one", "v two"],
        "test": ["t one"],
    }


PAGES = b"<mediawiki>\n" + b"".join(
    b"  <page>\n    <title>T%d</title>\n caf\xc3\xa9 %d\n  </page>\n" % (n, n) for n in range(12)
)


@pytest.fixture
def enwik8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import hashlib

    (tmp_path / "enwik8").write_bytes(PAGES)
    monkeypatch.setattr(benchmarks, "ENWIK8_BYTES", len(PAGES))
    monkeypatch.setattr(benchmarks, "ENWIK8_MD5", hashlib.md5(PAGES).hexdigest())
    cut = PAGES.index(b"\xc3", 300) + 1  # in the middle of a character
    monkeypatch.setattr(benchmarks, "ENWIK8_ENDS", {"train": cut, "valid": cut + 50, "test": len(PAGES)})
    monkeypatch.setitem(BENCHMARKS, "enwik8", Benchmark("enwik8", "bytes", (0, 0, 0), len(set(PAGES))))
    return tmp_path


@pytest.mark.parametrize("packed", ["", ".gz", ".zip"])
def test_enwik8(enwik8: Path, tmp_path: Path, packed: str) -> None:
    if packed == ".gz":
        (enwik8 / "enwik8.gz").write_bytes(gzip.compress(PAGES))
    if packed == ".zip":
        with zipfile.ZipFile(enwik8 / "enwik8.zip", "w") as archive:
            archive.writestr("enwik8", PAGES)
    if packed:
        (enwik8 / "enwik8").unlink()
    made = build(tmp_path, source="enwik8", data_dir=str(enwik8), tokens="bytes")
    vocabulary = load_vocabulary(made.path)
    assert isinstance(vocabulary, ByteVocabulary)
    read = b""
    for split in ("train", "valid", "test"):
        tokens = np.asarray(Stream(made, split).tokens)
        read += bytes(vocabulary.values[t] for t in tokens if t != END)
        assert made.facts[split]["bytes"] == made.facts[split]["tokens"] == (tokens != END).sum()
    assert read == PAGES
    assert Stream(made, "train").documents[1].name == "T0"


def test_enwik8_that_is_not_is_refused(enwik8: Path) -> None:
    (enwik8 / "enwik8").write_bytes(PAGES[:-1])
    with pytest.raises(CorpusError, match="is not enwik8"):
        read_benchmark("enwik8", enwik8)
    (enwik8 / "enwik8").unlink()
    with pytest.raises(CorpusError, match=r"holds no enwik8"):
        read_benchmark("enwik8", enwik8)
    (enwik8 / "enwik8.gz").write_bytes(b"junk")
    with pytest.raises(CorpusError, match="cannot be unpacked"):
        read_benchmark("enwik8", enwik8)


@pytest.mark.timeout(30)
def test_files_of_a_benchmark_that_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in ("wikitext-2", "enwik8"):
        for place in (tmp_path, tmp_path / "pipe"):
            files = dict.fromkeys(("train", "valid", "test"), place)
            with pytest.raises(CorpusError, match="is not a file; expected one file for each split"):
                read_benchmark(source, None, files)
            with pytest.raises(CorpusError, match="is not a file"):
                benchmarks.benchmark_fingerprint(source, files)


def test_damaged_files_of_a_benchmark(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(b"words"))
    damaged[10] = 0xFF
    (tmp_path / "a.GZ").write_bytes(damaged)
    files = dict.fromkeys(("train", "valid", "test"), tmp_path / "a.GZ")
    with pytest.raises(CorpusError, match=r"a.GZ cannot be read as UTF-8 text \(.*\); download or convert it again"):
        read_benchmark("wikitext-2", None, files)
    with pytest.raises(CorpusError, match=r"a.GZ cannot be unpacked \(.*\); download it again"):
        read_benchmark("enwik8", None, files)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", "words")
    locked = bytearray((tmp_path / "a.zip").read_bytes())
    for name, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(name) + flags] |= 1  # says that it is encrypted
    (tmp_path / "a.zip").write_bytes(locked)
    with pytest.raises(CorpusError, match=r"a.zip cannot be unpacked \(.*password.*\)"):
        read_benchmark("enwik8", None, dict.fromkeys(("train", "valid", "test"), tmp_path / "a.zip"))


def test_a_home_directory_that_is_not_there(tmp_path: Path) -> None:
    config = CorpusConfig(source="enwik8", data_dir="~no-such-user/data")
    with pytest.raises(CorpusError, match="~no-such-user/data is not a folder"):
        read_splits(config, 0, tmp_path)
    with pytest.raises(CorpusError, match=r"dataset ~no-such-user/x, split 'train' cannot be loaded"):
        hub.load_split("~no-such-user/x", None, "train")


def test_without_a_folder_and_offline_it_says_what_to_do() -> None:
    with pytest.raises(CorpusError, match=r"wikitext-103 could not be downloaded from the hub .* --data-dir"):
        read_benchmark("wikitext-103", None)


def test_benchmarks_are_not_cleaned() -> None:
    with pytest.raises(ConfigError, match="stay as published"):
        parse_config({"run": "r", "corpus": {"source": "enwik8", "overlap": "drop"}})


def test_lines_as_documents(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    lines = [f"sentence number {n} of the text" for n in range(40)]
    (tmp_path / "text" / "shard.txt").write_text("\n".join(lines) + "\n")
    made = build(
        tmp_path / "run",
        source=".",
        data_dir=str(tmp_path / "text"),
        documents="lines",
        tokens="words",
        overlap="count",
    )
    assert sum(made.facts[split]["documents"] for split in ("train", "valid", "test")) == 40
    names = [d.name for d in Stream(made, "train").documents]
    assert all(name.startswith("shard.txt:") for name in names)
    assert made.facts["test"]["overlap"]["repeats_were"] == "kept"


def test_split_files_in_a_folder_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of words: the newline at a file's end ends its last line and begins no other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "mine" / f"{split}.txt").write_text(f"{split} b c\nd e f\n")
    files = {split: f"{split}.txt" for split in ("train", "valid", "test")}
    made = build(tmp_path, source=None, data_dir="mine", tokens="words", overlap="skip", **files)
    assert made.facts["train"]["tokens"] == 8
    config = CorpusConfig(source=None, data_dir="mine", tokens="words", **files)
    assert text_fingerprint(config, tmp_path / "run")
    with pytest.raises(CorpusError, match="nowhere is not a folder"):
        build(tmp_path, source=None, data_dir="nowhere", tokens="words", **files)


def test_the_folder_may_move(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("one two")
    configs = [CorpusConfig(source="a.txt", data_dir=str(tmp_path / name)) for name in ("here", "there")]
    assert text_fingerprint(configs[0], tmp_path / "run") == text_fingerprint(configs[1], tmp_path / "run")


# -- vocabularies --------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 30))
def test_cutting_words_cuts_tokens(text: str, limit: int) -> None:
    vocabulary = WordVocabulary.count([text])
    ids, offsets = vocabulary.tokenize(text)
    cut, _ = vocabulary.tokenize(cut_words(text, limit))
    assert cut[:limit] == ids[:limit]
    assert offsets == sorted(offsets)
    assert ids.count(vocabulary.start) == text.count("\n") + 1


def test_rare_words_are_unknown(tmp_path: Path) -> None:
    vocabulary = WordVocabulary.count(["a a b", "a b c"], min_count=2)
    assert vocabulary.words == ["a", "<eos>", "b", "<unk>"]
    vocabulary.save(tmp_path)
    again = load_vocabulary(tmp_path)
    assert again is not None
    assert again.tokenize("c a") == ([3, 0, 1], [0, 2, 3])
    assert load_vocabulary(tmp_path / "nothing") is None


@given(st.binary(max_size=40))
def test_any_bytes_come_back(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    vocabulary = ByteVocabulary.count([text])
    ids, offsets = vocabulary.tokenize(text)
    assert bytes(vocabulary.values[i] for i in ids) == data
    assert len(offsets) == len(ids)
    assert all(0 <= o < len(text) for o in offsets)


def test_unknown_byte_is_told() -> None:
    with pytest.raises(ModelError, match="byte 0x7a"):
        ByteVocabulary.count(["abc"]).tokenize("az")


# -- Hugging Face datasets -----------------------------------------------------------------------------------------


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"title": ["A", "B", "C"], "body": ["one two", "three four", ""]}
    whole = datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name in ("train", "validation", "test")})
    whole.save_to_disk(str(tmp_path / "saved"))
    made = build_with_lm(tmp_path, dataset=str(tmp_path / "saved"), text_column="body", source=None, overlap="count")
    assert [d.name for d in Stream(made, "train").documents] == ["train:A", "train:B"]
    assert made.facts["valid"]["documents"] == 2
    with pytest.raises(CorpusError, match=r"set corpus\.text_column to one of title, body"):
        build_with_lm(tmp_path / "x", dataset=str(tmp_path / "saved"), source=None)
    with pytest.raises(CorpusError, match="has no split 'dev'"):
        build_with_lm(tmp_path / "y", dataset=str(tmp_path / "saved"), valid="dev", text_column="body")
    with pytest.raises(CorpusError, match="cannot be loaded"):
        build_with_lm(tmp_path / "z", dataset="no/such-dataset", source=None)
    config = CorpusConfig(dataset=str(tmp_path / "saved"), text_column="body", source=None)
    assert text_fingerprint(config, tmp_path) == text_fingerprint(config, tmp_path)


class Characters:
    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        return [ord(c) % 100 for c in text], list(range(len(text)))


def build_with_lm(folder: Path, **config: Any) -> Artifact:
    with Draft(folder / "corpus", "corpus", {}) as draft:
        return build_corpus(draft, CorpusConfig(**config), seed=0, lm=lambda: (Characters(), 100))


def test_no_script_of_a_dataset_is_run_or_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of datasets ask on the terminal unless they are told not to."""
    datasets = pytest.importorskip("datasets")
    told: list[object] = []

    def load(*_: object, trust_remote_code: object = None, **__: object) -> object:
        told.append(trust_remote_code)
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    hub.load_split("some/dataset", None, "train")
    hub.load_split("some/dataset", "one", "train", converted=True)
    assert told == [False, False]
    monkeypatch.undo()
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(CorpusError, match="cannot be loaded"):
        hub.load_split(str(tmp_path / "scripted"), None, "train")
    assert not (tmp_path / "ran").exists()


def test_datasets_that_will_not_do(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).save_to_disk(tmp_path / "one")
    with pytest.raises(CorpusError, match="has no splits"):
        build_with_lm(tmp_path, dataset=str(tmp_path / "one"), source=None)
    numbers = datasets.Dataset.from_dict({"text": [1, 2, 3]})
    datasets.DatasetDict(train=numbers, validation=numbers, test=numbers).save_to_disk(tmp_path / "numbers")
    with pytest.raises(CorpusError, match="does not hold text but"):
        build_with_lm(tmp_path, dataset="numbers", data_dir=str(tmp_path), source=None)
