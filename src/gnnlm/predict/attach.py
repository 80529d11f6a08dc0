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

import numpy as np
import torch

from gnnlm.config import LMConfig
from gnnlm.corpus.in_memory import HeldText
from gnnlm.corpus.sources import check_text
from gnnlm.corpus.stream import TokenizedDocument
from gnnlm.corpus.text_files import cited, read_text
from gnnlm.datastore.encode import encode_jobs, plan_jobs, round_states
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
    """The documents to attach, read and tokenized; each is named `attached:` and its file's name, or the name given."""
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
    """The model with documents behind those of its store; the model itself does not change."""
    text, reading = HeldText(documents), model.reading
    rule = LMConfig(window=reading.window, context=reading.context, whole_lines=reading.whole_lines)
    jobs = [
        job
        for document in documents
        for job in plan_jobs(np.array(document.tokens), np.arange(len(document.tokens) + 1), model.lm, rule)
    ]
    made = encode_jobs(model.lm, jobs, rule.batch_tokens, reading.key)
    states = round_states(made.states, reading.dtype)
    keys = states if made.keys is None else round_states(made.keys, reading.dtype)
    starts, before = torch.from_numpy(text.starts), len(model.store)
    segment = Segment(coded_like(model.store, states), torch.from_numpy(text.tokens), starts, text)
    store = Store([*model.store.segments, segment])
    rows = Rows(starts)
    metric, device = model.index.metric, str(model.predictor.head.device)
    indexes: list[Index] = [model.index, ExactIndex.over(keys, rows.all(), metric, device)]
    index = SegmentedIndex([0, before, len(store)], [len(model.index), len(rows)], metric, indexes.__getitem__)
    graphs = replace(model.predictor.graphs, store=store)
    lines = cached_lines(model.predictor, graphs, torch.arange(before, len(store)))
    return replace(model, store=store, index=index, predictor=with_segments(model.predictor, store, [lines]))


def _read(given: Attachment) -> tuple[str, str]:
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        if not os.path.isfile(path):
            raise CorpusError(f"{cited(path)}: no such file; attach a text file, or a pair (name, text)")
        return PREFIX + cited(path.name), read_text(path, "utf-8")
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, str) for part in given)):
        raise CorpusError(f"expected a file or a pair (name, text) to attach, got {str(given)[:80]}")
    return PREFIX + given[0], given[1]
