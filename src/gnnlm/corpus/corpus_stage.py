"""The corpus stage: text is read, split, cleaned, tokenized and cut into segments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import SCRATCH, Config
from gnnlm.errors import CorpusError, ModelError
from gnnlm.progress import warn
from gnnlm.stage import BuildContext, InputFacts, LastBuild, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.corpus.stream import Stream
    from gnnlm.run.snapshot import Snapshot

WHERE = ("source", "dataset", "train", "valid", "test")  # the fields of the corpus that say where its text is


class CorpusStage(Stage):
    name = "corpus"
    folder = "corpus"
    help = "Read, split, clean and tokenize the text."
    part = "text"
    reads_text = True

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        corpus = config.corpus
        section = section_inputs(corpus, "corpus", skip=("data_dir", "min_documents", *WHERE))
        section["corpus.overlap"] = corpus.overlap_rule
        limited = corpus.max_valid_tokens is not None or corpus.max_test_tokens is not None
        if limited and corpus.shared_by > 1:
            section["corpus.min_documents"] = corpus.shared_by
        section["store.segment_tokens"] = _segment_tokens(config, known.last)
        text = _text(config, known)
        return {**section, **text, "seed": config.seed, "model files": _model_files(config, known)}

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.corpus.build import build_corpus

        config, snapshot = context.config, context.snapshot
        return build_corpus(
            draft,
            config.corpus,
            config.seed,
            lambda: (snapshot.source_lm, snapshot.source_lm.vocab_size),
            config.store.segment_tokens,
        )

    def load(self, snapshot: Snapshot, split: str) -> Stream:
        from gnnlm.corpus.stream import Stream

        return Stream(snapshot.artifact(self.name), split)

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        return "" if snapshot.config.corpus.tokens == "lm" else "the vocabulary has its words or bytes"


def _text(config: Config, known: InputFacts) -> dict[str, Any]:
    """Return the places and digests of the text; those of the last build where the text cannot be read any more."""
    from gnnlm.corpus.build import text_fingerprint, text_names

    last = known.last
    recorded = {key: last.inputs.get(key) for key in (*(f"corpus.{name}" for name in WHERE), "text")}
    if last.inputs and known.reading:
        return recorded
    try:
        digests = text_fingerprint(config.corpus, leave_out=Path(config.run))
    except CorpusError as error:
        if not last.inputs:
            raise
        warn(f"{error}; the corpus that was built earlier is used")
        return recorded
    names = {f"corpus.{name}": value for name, value in text_names(config.corpus).items()}
    return {**names, "text": digests}


def _segment_tokens(config: Config, last: LastBuild) -> int:
    """Return the size of a segment; the recorded one where both hold the whole train text in one segment."""
    size = config.store.segment_tokens
    if not last.inputs:
        return size
    train: Mapping[str, int] = last.facts["train"]
    before: int = last.inputs["store.segment_tokens"]
    return before if train["tokens"] + train["documents"] <= min(size, before) else size


def _model_files(config: Config, known: InputFacts) -> str:
    if config.lm.model == SCRATCH:
        return SCRATCH
    try:
        return known.identify(config.lm.model)
    except ModelError:  # a missing model is reported when it is needed
        if not known.last.inputs:
            raise
        return str(known.last.inputs["model files"])


CORPUS = CorpusStage()
