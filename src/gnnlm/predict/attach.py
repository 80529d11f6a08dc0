"""Attached text: documents that one request or session looks up beside the store. They are never written to disk.

An attached document becomes a segment of its own behind the store's last, made as the run's segments are made: encoded
with the same model in the same windows, rounded to the same precision, coded by the same quantizer. Its rows are
searched exactly and merged with what the store's index finds, so predictions are those of a run that has the document
in its store, with the same trained parts. Under `lm.continuous` it is read by itself, not after the store's last text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gnnlm.config import LMConfig, StoreConfig
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.in_memory import MemoryStream
from gnnlm.corpus.sources import check_text
from gnnlm.corpus.text_files import cited, read_text
from gnnlm.datastore.encode import Encoder, SegmentStates
from gnnlm.datastore.store import Segment, Store
from gnnlm.errors import CorpusError
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.overlay import cached_lines, coded_like, with_segments
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Index, Rows
from gnnlm.retrieval.segmented import SegmentedIndex

PREFIX = "attached:"  # of the names of attached documents
Attachment = str | os.PathLike[str] | tuple[str, str]  # a file, or (name, text)
Attachments = str | os.PathLike[str] | Iterable[Attachment]


def taken(model: OpenBook, given: Attachments) -> list[TokenizedDocument]:
    """Read and tokenize the documents to attach; each is named `attached:` and its file's name, or the name given."""
    if not isinstance(given, (str, os.PathLike, Iterable)):
        raise CorpusError(f"expected files or pairs (name, text) to attach, got {type(given).__name__}")
    named = [_read(each) for each in ([given] if isinstance(given, (str, os.PathLike)) else given)]
    known = set(model.store.names)
    documents = []
    for name, text in named:
        if name in known:
            raise CorpusError(f"two documents would be named {name}; give each attached document a name of its own")
        known.add(name)
        check_text(text, name)
        documents.append(TokenizedDocument.make(name, text, model.lm.tokenize, None))
        if not documents[-1].tokens:
            raise CorpusError(f"{name} has no tokens; attach documents with text")
    if not documents:
        raise CorpusError("nothing to attach; name at least one file, or give a pair (name, text)")
    return documents


def attached(model: OpenBook, documents: Sequence[TokenizedDocument]) -> OpenBook:
    """Return the model with documents behind those of its store; the model itself does not change."""
    text = MemoryStream(documents)
    reading = model.reading
    rule = LMConfig(window=reading.window, context=reading.context, whole_lines=reading.whole_lines)
    encoder = Encoder(model.lm, rule, StoreConfig(key=reading.key, dtype=reading.dtype))
    made = SegmentStates(encoder, text).in_memory()
    states, keys = made["states"], made.get("keys", made["states"])
    segment = replace(Segment.over(text, states), states_PD=coded_like(model.store, states))
    store = Store([*model.store.segments, segment])
    rows = Rows.of(text)
    metric = model.index.metric
    device = str(model.predictor.head.device)
    indexes: list[Index] = [model.index, ExactIndex.over(keys, rows.all(), metric, device)]
    bases = [0, len(model.store), len(store)]
    sizes = [len(model.index), len(rows)]
    index = SegmentedIndex(bases, sizes, metric, indexes.__getitem__)
    predictor = with_segments(model.predictor, store, [cached_lines(model.predictor, segment)])
    return replace(model, store=store, index=index, predictor=predictor)


def _read(given: Attachment) -> tuple[str, str]:
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        if not os.path.isfile(path):
            raise CorpusError(f"{cited(path)}: no such file; attach a text file, or a pair (name, text)")
        return PREFIX + cited(path.name), read_text(path, "utf-8")
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, str) for part in given)):
        raise CorpusError(f"expected a file or a pair (name, text) to attach, got {str(given)[:80]}")
    return PREFIX + given[0], given[1]
