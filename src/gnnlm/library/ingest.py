"""New documents: read, cleaned and tokenized as the run's corpus was, and compared with what it is evaluated on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from gnnlm.corpus.build import Tokenizer
from gnnlm.corpus.document import Document, TokenizedDocument
from gnnlm.corpus.overlap import Overlap, SeenText
from gnnlm.corpus.sources import check_text, read_documents
from gnnlm.corpus.text_files import cited
from gnnlm.corpus.vocabulary import load_vocabulary
from gnnlm.errors import CorpusError
from gnnlm.run import Run


class TextIngest:
    """The way from files and texts to documents of a run's store."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def read(self, paths: Iterable[str | Path]) -> list[Document]:
        """Read the documents of files and folders; each is named by its path in the given folder."""
        config, found = self._run.config.corpus, list[Document]()
        for path in paths:
            by_line = config.documents == "lines"
            found += read_documents(
                str(path), config.encoding, config.skip_unreadable, self._run.root, by_line, config.suffixes
            )
        return found

    def given(self, texts: Mapping[str, str]) -> list[Document]:
        """Check texts that are given by name, and return them as documents."""
        for name, text in texts.items():
            if not isinstance(name, str) or not name.strip() or not isinstance(text, str):
                raise CorpusError(
                    f"expected texts by name, both strings (got {type(text).__name__} under {str(name)[:80]!r})"
                )
            check_text(name, "the name of a document")
            check_text(text, cited(name))
            if not text.strip():
                raise CorpusError(f"{cited(name)} is empty; expected some text")
        return [Document(name, text) for name, text in texts.items()]

    def tokenized(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        """Tokenize documents; refuse two of one name, and one without tokens."""
        if not documents:
            raise CorpusError("no document was given; name at least one file or folder of text")
        name, times = Counter(document.name for document in documents).most_common(1)[0]
        if times > 1:
            raise CorpusError(
                f"{times} of the documents are named {name!r}; expected one of each name: give the folder that they "
                "lie in, rename them, or add them one after the other"
            )
        config, made = self._run.config.corpus, list[TokenizedDocument]()
        for document in documents:
            words = config.tokens == "words" and not config.is_benchmark
            text = document.text.removesuffix("\n") if words else document.text
            one = TokenizedDocument.make(document.name, text, self._tokenizer.tokenize, config.max_document_tokens)
            if not one.tokens:
                raise CorpusError(f"{cited(document.name)} has no tokens; expected some text")
            made.append(one)
        return made

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._run.config.corpus.tokens == "lm":
            return self._run.snapshot.source_lm
        vocabulary = load_vocabulary(self._run.artifact("corpus").path)
        assert vocabulary is not None
        return vocabulary

    @property
    def vocab_size(self) -> int:
        """The number of token ids, which decides how tokens are stored."""
        known: int = self._run.artifact("encode").facts["vocab_size"]
        made: dict[str, int] = self._run.artifact("corpus").facts.get("vocabulary", {})
        return made.get("size", known)

    def overlapping(self, documents: Sequence[TokenizedDocument]) -> list[int]:
        """Return the numbers of the documents that share a paragraph with valid or test."""
        config = self._run.config.corpus
        found = []
        for number, document in enumerate(documents):
            overlap = Overlap()
            self._held_out.clean(document.text, config.overlap_limit, overlap)
            if overlap.repeated_paragraphs:
                found.append(number)
        return found

    @cached_property
    def _held_out(self) -> SeenText:
        """The n-grams of valid and test."""
        seen = SeenText(self._run.config.corpus.overlap_ngram)
        for stream in self._run.snapshot.held_out.values():
            for document in stream.documents:
                seen.add(document.text)
        return seen

    @property
    def held_out_names(self) -> set[str]:
        """The names of the documents that the run is evaluated on."""
        return {name for stream in self._run.snapshot.held_out.values() for name in stream.names}
