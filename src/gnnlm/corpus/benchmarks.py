"""The published benchmarks as corpora: WikiText-103 and -2, One Billion Word, enwik8.

Each is read from a folder of its official files, or from the Hugging Face hub, and split as published. Its tokens are
counted first and compared with the published counts: files that are not the benchmark are refused.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gnnlm.corpus.document import Document, DocumentCollection, SplitDocuments
from gnnlm.corpus.hub import hub_lines
from gnnlm.corpus.stream import SPLITS
from gnnlm.corpus.text_files import read_bytes, reason_of
from gnnlm.corpus.vocabulary import WORD
from gnnlm.errors import CorpusError

Lines = Callable[[], Iterator[str]]

TITLE = re.compile(r"^ ?= ((?!= ).*(?<! =)) = ?$")
PAGE = re.compile(rb"(?=  <page>\n)")
ENWIK8_BYTES, ENWIK8_MD5 = 100_000_000, "a1fa5ffddb56f4953e226637dabbb36a"
ENWIK8_ENDS = {"train": 90_000_000, "valid": 95_000_000, "test": 100_000_000}


@dataclass(frozen=True)
class Benchmark:
    """The published counts of a benchmark, and how its files are read.

    `tokens` include one `<eos>` per line, `vocabulary` includes `<eos>` and `<unk>`.
    """

    name: str
    unit: str  # words or bytes
    tokens: tuple[int, int, int]
    vocabulary: int
    min_count: int = 1  # rarer words are <unk>
    sentences: tuple[int, int, int] | None = None  # lines, if every line is a document


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("wikitext-103", "words", tokens=(103_227_021, 217_646, 245_569), vocabulary=267_735),
        Benchmark("wikitext-2", "words", tokens=(2_088_628, 217_646, 245_569), vocabulary=33_278),
        Benchmark(
            "one-billion-word",
            "words",
            tokens=(798_949_912, 165_560, 159_658),
            vocabulary=793_471,
            min_count=3,
            sentences=(30_301_028, 6_206, 6_075),
        ),
        Benchmark("enwik8", "bytes", tokens=(90_000_000, 5_000_000, 5_000_000), vocabulary=205),
    )
}
HUB = {  # on the hub: repository, configuration, and whether only the hub's converted copy can be read
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-v1", False),
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-v1", False),
    "one-billion-word": ("billion-word-benchmark/lm1b", "plain_text", True),
    "enwik8": ("LTCB/enwik8", "enwik8-raw", True),
}


def read_benchmark(name: str, folder: Path | None, files: dict[str, Path] | None = None) -> SplitDocuments:
    """Return the splits of a benchmark: from a folder of official files, from one file per split, or from the hub."""
    benchmark = BENCHMARKS[name]
    if name == "enwik8":
        return _enwik8(folder, files)
    if files is not None:
        sources = {split: _file_lines([path]) for split, path in files.items()}
    elif folder is None:
        sources = {split: _hub_lines(name, split) for split in SPLITS}
    else:
        found = _one_billion_word(folder) if name == "one-billion-word" else _wikitext(name, folder)
        sources = {split: _file_lines(paths) for split, paths in found.items()}
    split_up = _sentences if name == "one-billion-word" else _articles
    made = {}
    for number, (split, lines) in enumerate(sources.items()):
        counted = _count(lines, split_up)
        if files is None:
            _compare(benchmark, split, number, counted)
        made[split] = DocumentCollection(counted.documents, partial(_split, split_up, lines))
    return made


def benchmark_fingerprint(name: str, files: dict[str, Path] | None) -> str:
    """Return the name of a published benchmark, wherever its files are, or a digest of other files."""
    if files is None:
        return f"{name} as published"
    digest = hashlib.sha256()
    for path in files.values():
        digest.update(f"{path.name}\0{_size(path)}\0".encode())
        digest.update(read_bytes(path))
    return digest.hexdigest()[:16]


# -- words --------------------------------------------------------------------------------------------------------


@dataclass
class _TextCounts:
    documents: int = 0
    lines: int = 0
    tokens: int = 0


def _split(split_up: Callable[[Iterator[str]], Iterator[Document]], lines: Lines) -> Iterator[Document]:
    return split_up(lines())


def _count(lines: Lines, split_up: Callable[[Iterator[str]], Iterator[Document]]) -> _TextCounts:
    counted = _TextCounts()
    for document in split_up(lines()):
        counted.documents += 1
        counted.lines += document.text.count("\n") + 1
        counted.tokens += len(WORD.findall(document.text))
    counted.tokens += counted.lines
    return counted


def _compare(benchmark: Benchmark, split: str, number: int, counted: _TextCounts) -> None:
    published = {"tokens, <eos> included": (benchmark.tokens[number], counted.tokens)}
    if benchmark.sentences is not None:
        published["lines"] = benchmark.sentences[number], counted.lines
    for what, (expected, got) in published.items():
        if got != expected:
            raise CorpusError(
                f"this is not {benchmark.name}: expected {expected:,} {what} in its {split} split (got {got:,}); get "
                "the official files, or give these as corpus.train, corpus.valid and corpus.test"
            )


def _articles(lines: Iterator[str]) -> Iterator[Document]:
    """Yield articles, named by their titles; every line belongs to an article."""
    name = ""
    kept = list[str]()
    blank = True
    for line in lines:
        title = TITLE.match(line) if blank else None
        if title and any(each.strip() for each in kept):
            yield Document(name, "\n".join(kept))
            kept = []
        if title:
            name = title.group(1)
        kept.append(line)
        blank = not line.strip()
    if kept:
        yield Document(name, "\n".join(kept))


def _sentences(lines: Iterator[str]) -> Iterator[Document]:
    """Yield every line as a document of its own: the sentences were shuffled."""
    for number, line in enumerate(lines, start=1):
        yield Document(f"sentence {number}", line)


def _file_lines(paths: list[Path]) -> Lines:
    for path in paths:
        _size(path)

    def lines() -> Iterator[str]:
        for path in paths:
            opened = gzip.open if path.suffix.lower() == ".gz" else open
            try:
                with opened(path, "rt", encoding="utf-8", newline="\n") as file:
                    for line in file:
                        yield str(line).rstrip("\r\n")
            except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
                raise CorpusError(
                    f"{path} cannot be read as UTF-8 text ({reason_of(error)}); download or convert it again"
                ) from error

    return lines


def _wikitext(name: str, folder: Path) -> dict[str, list[Path]]:
    """Return the files wiki.train.tokens and so on, as published; or train.txt and so on."""
    found = {}
    for split in SPLITS:
        names = [f"wiki.{split}.tokens", f"{split}.txt"]
        there = [folder / each for each in names if (folder / each).is_file()]
        if not there:
            raise CorpusError(
                f"{folder} holds no {names[0]} (or {names[1]}), and {name} needs all three splits; unpack the official "
                "archive and give its folder with --data-dir"
            )
        found[split] = there[:1]
    return found


def _one_billion_word(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split: 99 shards of train; of the held-out shards, the first is test, the second valid.

    The release also has a file named like train shard 0. It is the whole held-out set, and is never read.
    """
    train = sorted(path for path in folder.rglob("news.en-*-of-00100") if path.name != "news.en-00000-of-00100")
    heldout = {path.name: path for path in folder.rglob("news.en.heldout-*-of-00050")}
    names = {"valid": "news.en.heldout-00001-of-00050", "test": "news.en.heldout-00000-of-00050"}
    missing = [name for name in names.values() if name not in heldout]
    if missing or [path.name for path in train] != [f"news.en-{n:05}-of-00100" for n in range(1, 100)]:
        raise CorpusError(
            f"{folder} is not One Billion Word: expected its 99 shards news.en-*-of-00100 (got {len(train)}) and "
            f"{' and '.join(names.values())} ({len(missing)} missing); unpack the official archive and give its folder "
            "with --data-dir"
        )
    return {"train": train, "valid": [heldout[names["valid"]]], "test": [heldout[names["test"]]]}


def _hub_lines(name: str, split: str) -> Lines:
    sentences = BENCHMARKS[name].sentences
    if sentences is None:
        return hub_lines(name, *HUB[name], {"valid": "validation"}.get(split, split))
    test = sentences[2]
    valid = sentences[1]  # the hub's test split is all held-out shards, one after another
    rows = {"train": None, "test": range(test), "valid": range(test, test + valid)}
    return hub_lines(name, *HUB[name], "train" if split == "train" else "test", rows[split])


# -- bytes ----------------------------------------------------------------------------------------------------------


def _enwik8(folder: Path | None, files: dict[str, Path] | None) -> SplitDocuments:
    if files is not None:
        parts = {split: _unpacked(path) for split, path in files.items()}
    else:
        if folder is None:
            file = "the hub's file"
            data = "".join(_hub_lines("enwik8", "train")()).encode()
        else:
            file = str(_enwik8_file(folder))
            data = _unpacked(_enwik8_file(folder))
        if len(data) != ENWIK8_BYTES or hashlib.md5(data, usedforsecurity=False).hexdigest() != ENWIK8_MD5:
            raise CorpusError(
                f"{file} is not enwik8: expected {ENWIK8_BYTES:,} bytes with MD5 {ENWIK8_MD5} (got {len(data):,} bytes)"
                "; download it again, or give your files as corpus.train, corpus.valid and corpus.test"
            )
        starts = {"train": 0, "valid": ENWIK8_ENDS["train"], "test": ENWIK8_ENDS["valid"]}
        parts = {split: data[starts[split] : ENWIK8_ENDS[split]] for split in SPLITS}
    made = {}
    for split, part in parts.items():
        made[split] = DocumentCollection.of(list(_pages(part)))
    return made


def _enwik8_file(folder: Path) -> Path:
    for name in ("enwik8", "enwik8.gz", "enwik8.zip"):
        if (folder / name).is_file():
            return folder / name
    raise CorpusError(
        f"{folder} holds no enwik8, enwik8.gz or enwik8.zip; give the folder that holds one with --data-dir"
    )


def _unpacked(path: Path) -> bytes:
    _size(path)
    try:
        if path.suffix.lower() == ".gz":
            return gzip.decompress(path.read_bytes())
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                if len(names) != 1:
                    raise CorpusError(f"{path}: expected one file in the archive, the text (got {len(names)})")
                return archive.read(names[0])
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError) as error:  # RuntimeError: a password
        raise CorpusError(f"{path} cannot be unpacked ({reason_of(error)}); download it again") from error
    return read_bytes(path)


def _pages(data: bytes) -> Iterator[Document]:
    """Yield the pages of the dump, named by their titles; bytes that are not UTF-8 are kept (a page may be cut)."""
    for number, page in enumerate(part for part in PAGE.split(data) if part):
        title = re.search(rb"<title>(.*?)</title>", page)
        name = title.group(1).decode("utf-8", "replace") if title else f"part {number}"
        yield Document(name, page.decode("utf-8", "surrogateescape"))


def _size(path: Path) -> int:
    """Return the size of a file. Refuse anything but a file: reading a pipe would wait for ever."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read: {reason_of(error)}; check the path") from error
    if not stat.S_ISREG(status.st_mode):
        raise CorpusError(f"{path} is not a file; expected one file for each split of a benchmark")
    return status.st_size
