"""The corpus stage: documents are read, split, cleaned of overlap, cut to size and tokenized."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import CorpusConfig
from gnnlm.corpus.overlap import Overlap, Seen
from gnnlm.corpus.sources import Document, read_documents
from gnnlm.corpus.stream import SPLITS, Tokenize, TokenizedDocument, save_split
from gnnlm.errors import CorpusError
from gnnlm.progress import Track, warn

MUCH = 0.1  # share of a split that may stand in earlier text before a warning


def split_documents(documents: list[Document], config: CorpusConfig, seed: int) -> dict[str, list[Document]]:
    """Deal whole documents out to the splits, in an order that depends on names and seed alone."""
    if len(documents) < 3:
        raise CorpusError(
            f"corpus.source holds {len(documents)} document(s), three splits need at least 3; "
            "give more files, a .jsonl of documents, or corpus.train, corpus.valid and corpus.test"
        )
    dealt = sorted(documents, key=lambda d: hashlib.sha256(f"{seed}:{d.name}".encode()).digest())
    test = max(1, round(config.test_share * len(dealt)))
    valid = max(1, round(config.valid_share * len(dealt)))
    if test + valid >= len(dealt):
        raise CorpusError(
            f"corpus.valid_share and corpus.test_share leave none of {len(dealt)} documents for train; lower them, "
            "or give more documents"
        )
    return {"test": dealt[:test], "valid": dealt[test : test + valid], "train": dealt[test + valid :]}


def read_splits(config: CorpusConfig, seed: int, leave_out: Path) -> dict[str, list[Document]]:
    options = (config.encoding, config.skip_unreadable, leave_out)
    if config.train is not None:
        assert config.valid is not None
        assert config.test is not None
        paths = {"train": config.train, "valid": config.valid, "test": config.test}
        return {split: read_documents(path, *options) for split, path in paths.items()}
    assert config.source is not None
    return split_documents(read_documents(config.source, *options), config, seed)


@dataclass
class _Split:
    documents: list[TokenizedDocument] = field(default_factory=list)
    overlap: Overlap = field(default_factory=Overlap)


def build_corpus(draft: Draft, config: CorpusConfig, seed: int, tokenize: Tokenize, vocab_size: int) -> Artifact:
    """Build the corpus artifact. Earlier splits win: valid is cleaned of train, test of train and valid."""
    documents = read_splits(config, seed, leave_out=draft.path.parent)
    seen = Seen(config.overlap_ngram)
    facts: dict[str, Any] = {}
    for split in SPLITS:
        limit = getattr(config, f"max_{split}_tokens")
        drop = split != "train" or config.drop_train_duplicates
        made = _place(documents[split], config, seen, tokenize, limit, drop, split)
        if not made.documents:
            raise CorpusError(
                f"the {split} split has no text left after {made.overlap.repeated_paragraphs} paragraphs that also "
                "stand in an earlier split were dropped; give it other text, or raise corpus.overlap_limit"
            )
        save_split(draft, split, made.documents, vocab_size)
        if split != "train":
            _warn_of_overlap(split, made.overlap.facts())
        facts[split] = {
            "documents": len(made.documents),
            "tokens": sum(len(d.tokens) for d in made.documents),
            "bytes": sum(len(d.text.encode()) for d in made.documents),
            "whitespace_words": sum(len(d.text.split()) for d in made.documents),
            "overlap": {**made.overlap.facts(), "repeats_were": "dropped" if drop else "kept"},
        }
    return draft.finish(facts)


def _warn_of_overlap(split: str, overlap: dict[str, float | int]) -> None:
    left = max(overlap["remaining_ngram_overlap"], overlap["remaining_short_overlap"])
    gone = overlap["repeated_words"] / max(1, overlap["words"])
    if left > MUCH:
        warn(f"{100 * left:.0f}% of the {split} split still stands in earlier text: its figures will flatter retrieval")
    if gone > 0.5:
        warn(f"{100 * gone:.0f}% of the {split} split stood in earlier text and was dropped: check the splits")


def _place(
    documents: list[Document],
    config: CorpusConfig,
    seen: Seen,
    tokenize: Tokenize,
    max_tokens: int | None,
    drop: bool,
    split: str,
) -> _Split:
    made = _Split()
    total = 0
    placed: list[str] = []
    with Track(f"corpus {split}", len(documents), "documents") as track:
        for document in documents:
            track.advance(1)
            if max_tokens is not None and total >= max_tokens:
                continue
            cleaned = seen.clean(document.text, config.overlap_limit, made.overlap)
            text = cleaned if drop else document.text
            if not text.strip():
                made.overlap.documents_emptied += 1
                continue
            room = None if max_tokens is None else max_tokens - total
            limit = min((x for x in (room, config.max_document_tokens) if x is not None), default=None)
            tokenized = TokenizedDocument.make(document.name, text, tokenize, limit)
            if not tokenized.tokens:
                continue
            made.documents.append(tokenized)
            total += len(tokenized.tokens)
            seen.count(tokenized.text, made.overlap)
            if split == "train":  # a train document is compared with the train documents before it
                seen.add(tokenized.text)
            else:
                placed.append(tokenized.text)
    for text in placed:
        seen.add(text)
    return made
