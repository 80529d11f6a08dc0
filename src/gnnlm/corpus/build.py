"""The corpus stage: read documents, split them, remove overlap, cut them to size and tokenize them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import CorpusConfig, StoreConfig
from gnnlm.corpus.benchmarks import BENCHMARKS, benchmark_fingerprint, read_benchmark
from gnnlm.corpus.document import Document, DocumentCollection, SplitDocuments, Tokenize, TokenizedDocument
from gnnlm.corpus.hub import dataset_fingerprint, read_dataset
from gnnlm.corpus.overlap import Overlap, SeenText
from gnnlm.corpus.sources import PYTHON_DOCS, read_documents, source_fingerprint
from gnnlm.corpus.stream import SPLITS
from gnnlm.corpus.text_files import expanded
from gnnlm.corpus.text_writer import SplitWriter
from gnnlm.corpus.vocabulary import FILE as VOCABULARY
from gnnlm.corpus.vocabulary import WORD, ByteVocabulary, Vocabulary, WordVocabulary, cut_words
from gnnlm.errors import CorpusError
from gnnlm.progress import Track, say, warn

SPECIAL = 1  # special tokens, such as <S>, that some count in a vocabulary and others do not
LOCAL = "local files"
MUCH = 0.1  # share of a split that may appear in earlier text before there is a warning


def split_documents(documents: list[Document], config: CorpusConfig, seed: int) -> dict[str, list[Document]]:
    """Assign whole documents to the splits, in an order that depends only on their names and the seed."""
    if len(documents) < 3:
        raise CorpusError(
            f"corpus.source holds {len(documents)} document(s), but three splits need at least 3; "
            "give more files, a .jsonl of documents, or corpus.train, corpus.valid and corpus.test"
        )
    dealt = sorted(documents, key=lambda d: hashlib.sha256(f"{seed}:{d.name}".encode()).digest())
    test = max(1, round(config.test_share * len(dealt)))
    valid = max(1, round(config.valid_share * len(dealt)))
    if test + valid >= len(dealt):
        raise CorpusError(
            f"corpus.valid_share and corpus.test_share leave none of the {len(dealt)} documents for train; lower them, "
            "or give more documents"
        )
    return {"test": dealt[:test], "valid": dealt[test : test + valid], "train": dealt[test + valid :]}


def read_splits(config: CorpusConfig, seed: int, leave_out: Path) -> SplitDocuments:
    """Return the documents of every split, from whatever source the config names."""
    splits = _read_splits(config, seed, leave_out)
    if config.tokens != "words" or config.is_benchmark:
        return splits
    return {split: _without_last_newline(documents) for split, documents in splits.items()}


def _without_last_newline(documents: DocumentCollection) -> DocumentCollection:
    """Remove the newline that ends a text: in a corpus of words it ends the last line and does not start another."""

    def opened() -> Iterator[Document]:
        return (Document(document.name, document.text.removesuffix("\n")) for document in documents)

    return DocumentCollection(len(documents), opened)


def _read_splits(config: CorpusConfig, seed: int, leave_out: Path) -> SplitDocuments:
    folder = _folder_of(config)
    if config.dataset is not None:
        name = _dataset_name(config)
        return read_dataset(name, config.dataset_config, config.text_column, _dataset_splits(config))
    if config.source is not None and config.is_benchmark:
        return read_benchmark(config.source, folder, _split_files(config))

    def read(place: str) -> list[Document]:
        by_line = config.documents == "lines"
        return read_documents(place, config.encoding, config.skip_unreadable, leave_out, by_line, config.suffixes)

    files = _split_files(config)
    if files is not None:
        return {split: DocumentCollection.of(read(str(path))) for split, path in files.items()}
    assert config.source is not None
    dealt = split_documents(read(_place_of(config.source, folder)), config, seed)
    return {split: DocumentCollection.of(documents) for split, documents in dealt.items()}


def text_fingerprint(config: CorpusConfig, leave_out: Path) -> dict[str, str]:
    """Return a digest of each file that a config names, or one of the whole corpus; they change with the text."""
    if config.dataset is not None:
        return {"dataset": dataset_fingerprint(_dataset_name(config), config.dataset_config, _dataset_splits(config))}
    files = _split_files(config)
    if config.source is not None and config.is_benchmark:
        return {config.source: benchmark_fingerprint(config.source, files)}
    if files is None:
        place = _place_of(config.source or "", _folder_of(config))
        return source_fingerprint(place, leave_out, config.suffixes)
    digests: dict[str, str] = {}
    for split, path in files.items():
        found = source_fingerprint(str(path), leave_out, config.suffixes)
        digests |= {f"{split}: {name}": digest for name, digest in found.items()}
    return digests


def text_names(config: CorpusConfig) -> dict[str, str | None]:
    """Return the config's fields that say where the text is; local files count by their content, not by their path."""
    named: dict[str, str | None] = dict.fromkeys(("source", "dataset", "train", "valid", "test"))
    if config.dataset is not None:
        name = _dataset_name(config)
        local = Path(name).expanduser().exists()
        return {**named, **_dataset_splits(config), "dataset": LOCAL if local else name}
    if config.is_benchmark or (config.source == PYTHON_DOCS and config.train is None):
        return {**named, "source": config.source}
    return {**named, "source": LOCAL}


def _folder_of(config: CorpusConfig) -> Path | None:
    """Return the folder of the files that a config names; refused if there is no such folder."""
    if config.data_dir is None:
        return None
    folder = expanded(config.data_dir)
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder; give the one that holds the corpus with --data-dir")
    return folder


def _dataset_name(config: CorpusConfig) -> str:
    """Return the path of a dataset in the data folder, if it is there; otherwise the name itself."""
    folder = _folder_of(config)
    name = config.dataset or ""
    return str(folder / name) if folder is not None and (folder / name).exists() else name


def _place_of(source: str, folder: Path | None) -> str:
    return source if folder is None or source == PYTHON_DOCS else str(folder / source)


def _split_files(config: CorpusConfig) -> dict[str, Path] | None:
    """Return the files of the splits, if a config names them."""
    if config.train is None or config.valid is None or config.test is None:
        return None
    folder = _folder_of(config) or Path()
    return {"train": folder / config.train, "valid": folder / config.valid, "test": folder / config.test}


def _dataset_splits(config: CorpusConfig) -> dict[str, str]:
    return {"train": config.train or "train", "valid": config.valid or "validation", "test": config.test or "test"}


class Tokenizer(Protocol):
    """Turns text into tokens: a base model, or a vocabulary of words or bytes."""

    def tokenize(self, text: str) -> tuple[list[int], list[int]]: ...


def make_vocabulary(config: CorpusConfig, splits: SplitDocuments) -> Vocabulary:
    """Return the words of the part of train that the config uses, or the bytes of all splits."""
    if config.tokens == "bytes":
        return ByteVocabulary.count(document.text for split in SPLITS for document in splits[split])
    return WordVocabulary.count(_texts_within(config, splits["train"]), config.min_count)


def _texts_within(config: CorpusConfig, documents: DocumentCollection) -> Iterator[str]:
    """Yield the texts of train up to its token limit, counted in words and line ends."""
    total = 0
    for document in documents:
        room = None if config.max_train_tokens is None else config.max_train_tokens - total
        limit = min((x for x in (config.max_document_tokens, room) if x is not None), default=None)
        tokens = len(WORD.findall(document.text)) + document.text.count("\n") + 1
        if limit is not None and tokens > limit:
            yield cut_words(document.text, limit)
            total += limit
        else:
            yield document.text
            total += tokens
        if config.max_train_tokens is not None and total >= config.max_train_tokens:
            return


def build_corpus(
    draft: Draft,
    config: CorpusConfig,
    seed: int,
    lm: Callable[[], tuple[Tokenizer, int]],
    segment: int = StoreConfig().segment_tokens,
) -> Artifact:
    """Build the corpus artifact. Text of train is removed from valid, and text of train and valid from test.

    `lm` gives the base model's tokenizer and the size of its vocabulary; it is called only if its tokens are used.
    Train is cut into segments of at most `segment` positions.
    """
    splits = read_splits(config, seed, leave_out=draft.path.parent)
    facts: dict[str, Any] = {}
    if config.tokens == "lm":
        tokenizer, vocab_size = lm()
    else:
        vocabulary = make_vocabulary(config, splits)
        _check_vocabulary(config, vocabulary)
        vocabulary.save(draft.file(VOCABULARY).parent)
        tokenizer = vocabulary
        vocab_size = len(vocabulary)
        facts["vocabulary"] = {"kind": vocabulary.kind, "size": len(vocabulary)}
    seen = None if config.overlap_rule == "skip" else SeenText(config.overlap_ngram)
    for split in SPLITS:
        writer = SplitWriter(draft, split, vocab_size, segment if split == "train" else None)
        made = _place(splits[split], config, seen, tokenizer.tokenize, writer, split)
        facts[split] = {**made.counts, "overlap": made.overlap}
        if split != "train" and made.overlap is not None:
            _warn_of_overlap(split, made.overlap)
    counts = ", ".join(f"{split} {facts[split]['tokens']:,}" for split in SPLITS)
    say(f"corpus: tokens: {counts}; vocabulary: {vocab_size:,}")
    return draft.finish(facts)


def _check_vocabulary(config: CorpusConfig, vocabulary: Vocabulary) -> None:
    whole = config.max_train_tokens is None and config.max_document_tokens is None and config.train is None
    if config.source is None or not config.is_benchmark or not whole:
        return
    benchmark = BENCHMARKS[config.source]
    published = benchmark.vocabulary
    as_published = config.tokens == benchmark.unit and config.min_count == benchmark.min_count
    if as_published and abs(len(vocabulary) - published) > SPECIAL:
        raise CorpusError(
            f"this is not {config.source}: expected a vocabulary of {published:,} words, <eos> and <unk> included (got "
            f"{len(vocabulary):,}); get the official files"
        )


def _warn_of_overlap(split: str, overlap: dict[str, float | int]) -> None:
    left = max(overlap["remaining_ngram_overlap"], overlap["remaining_short_overlap"])
    gone = overlap["repeated_words"] / max(1, overlap["words"])
    if left > MUCH:
        warn(f"{100 * left:.0f}% of the {split} split still appears in earlier text: results will flatter retrieval")
    if gone > 0.5:
        warn(f"{100 * gone:.0f}% of the {split} split appeared in earlier text and was dropped: check the splits")


@dataclass(frozen=True)
class _SplitResult:
    counts: dict[str, int]
    overlap: dict[str, Any] | None


def _place(
    documents: DocumentCollection,
    config: CorpusConfig,
    seen: SeenText | None,
    tokenize: Tokenize,
    writer: SplitWriter,
    split: str,
) -> _SplitResult:
    """Clean, cut, tokenize and write the documents of a split, up to its token limit."""
    overlap = Overlap()
    max_tokens = getattr(config, f"max_{split}_tokens")
    drop = config.overlap_rule == "drop" and (split != "train" or config.drop_train_duplicates)
    placed: list[str] = []

    def tokenized() -> Iterator[TokenizedDocument]:
        for document in documents:
            track.advance(1)
            text = document.text
            if seen is not None:
                cleaned = seen.clean(text, config.overlap_limit, overlap)
                text = cleaned if drop else text
            if not text.strip() and config.tokens != "bytes":
                overlap.documents_emptied += 1
                continue
            made = TokenizedDocument.make(document.name, text, tokenize, config.max_document_tokens)
            if made.tokens:
                yield made

    with Track(f"corpus {split}", len(documents), "documents") as track:
        coming = tokenized()
        longest = None
        if split != "train" and max_tokens is not None:
            coming, longest = even_beginnings(coming, max_tokens, config.shared_by)
        for document in up_to(coming, max_tokens):
            writer.add(document)
            if seen is not None:
                seen.count(document.text, overlap)
                if split == "train":  # a train document is compared with the train documents before it
                    seen.add(document.text)
                else:
                    placed.append(document.text)
    if seen is not None:
        for text in placed:
            seen.add(text)
    if not writer.documents:
        if not overlap.repeated_paragraphs:
            raise CorpusError(f"the {split} split has no text; expected some in every split: give it text")
        raise CorpusError(
            f"the {split} split has no text left after dropping {overlap.repeated_paragraphs} paragraphs that also "
            "appear in an earlier split; give it other text, or raise corpus.overlap_limit"
        )
    facts = None if seen is None else {**overlap.facts(), "repeats_were": "dropped" if drop else "kept"}
    counts = writer.finish()
    return _SplitResult(counts if longest is None else {**counts, "cut_to": longest}, facts)


def up_to(documents: Iterator[TokenizedDocument], limit: int | None) -> Iterator[TokenizedDocument]:
    """Yield documents up to a number of tokens in all; the last is cut."""
    if limit is None:
        yield from documents
        return
    while limit and (document := next(documents, None)) is not None:
        document = document.cut(limit)
        limit -= len(document.tokens)
        yield document


def even_beginnings(
    documents: Iterator[TokenizedDocument], limit: int, count: int
) -> tuple[Iterator[TokenizedDocument], int | None]:
    """Return documents of which the first `count` fit into a limit, and the length they were cut to, if they were.

    Without this, a long document could fill a split alone, and its figures would say little about others.
    """
    first = list(itertools.islice(documents, count))
    if sum(len(document.tokens) for document in first) <= limit or count == 1:
        return itertools.chain(first, documents), None
    longest = even_length([len(document.tokens) for document in first], limit)
    return (document.cut(longest) for document in first), longest


def even_length(lengths: Sequence[int], limit: int) -> int:
    """Return the least length to which documents can be cut and still have `limit` tokens in all.

    >>> even_length([10, 2, 8], 12), even_length([10, 2, 8], 13), even_length([3, 2], 5)
    (5, 6, 3)
    """
    share = 0
    left = limit
    for place, length in enumerate(sorted(lengths)):
        share = -(-left // (len(lengths) - place))
        if length >= share:
            break
        left -= length
    return share
