"""The config section of the corpus."""

from __future__ import annotations

import codecs
from typing import Literal

from pydantic import Field, field_validator, model_validator

from gnnlm.config.config_section import MAX_TOKENS, ConfigSection
from gnnlm.config.messages import show

BENCHMARK_NAMES = ("wikitext-103", "wikitext-2", "one-billion-word", "enwik8")
SUFFIXES = (".txt", ".md", ".rst", ".adoc", ".html", ".htm", ".jsonl")
NOT_FILES = ("idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape")  # encodings of something else


class CorpusConfig(ConfigSection):
    source: str | None = Field(
        "python-docs",
        description="The text: a file or a folder (see `corpus.suffixes` for what is read), split by document; "
        "`python-docs`, the documentation of the Python that runs; or a benchmark, split as published: "
        "`wikitext-103`, `wikitext-2`, `one-billion-word`, `enwik8`. Set it to null when you give train, valid and "
        "test yourself.",
    )
    data_dir: str | None = Field(
        None,
        description="For a benchmark, the folder of its official files; without it they are downloaded from the "
        "Hugging Face hub. For other sources, the folder that relative paths start from. --data-dir sets it.",
    )
    dataset: str | None = Field(
        None,
        description="A Hugging Face dataset to use instead of a source: its name on the hub, or a local path. Then "
        "train, valid and test name its splits (default: train, validation, test).",
    )
    dataset_config: str | None = Field(
        None, description="The dataset's configuration (subset), for a dataset that has several."
    )
    text_column: str = Field("text", description="The column of the dataset that holds the text.")
    train: str | None = Field(
        None, description="File or folder of the train split. Give all three splits to use your own division."
    )
    valid: str | None = Field(None, description="File or folder of the valid split.")
    test: str | None = Field(None, description="File or folder of the test split.")
    suffixes: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="Which files of a folder are read, by the end of their names, such as [.tex, .py]; upper and lower "
        "case are the same, and .gz of each is read too. `.jsonl` holds a JSON object with a `text` field on each "
        "line, of `.html` and `.htm` the visible text is taken, and all else is plain text. Other files are skipped "
        "and counted. Default: .txt, .md, .rst, .adoc, .html, .htm and .jsonl.",
    )
    documents: Literal["files", "lines"] = Field(
        "files",
        description="What counts as a document of a text file: the whole file (`files`), or each line (`lines`).",
    )
    tokens: Literal["lm", "words", "bytes"] = Field(
        "lm",
        description="The unit of text. `lm`: the tokens of the base model. For a model trained from scratch: `words`, "
        "separated by spaces, each line ending in `<eos>`, with a vocabulary made from train; or `bytes`.",
    )
    min_count: int = Field(
        1,
        ge=1,
        le=10**9,
        description="With `words`: a word that occurs fewer times than this in train becomes `<unk>`.",
    )
    encoding: str = Field("utf-8", description="Encoding of the text files, such as utf-8, utf-16 or latin-1.")
    skip_unreadable: bool = Field(
        False,
        description="Skip files that cannot be read as text, with a warning, instead of stopping at the first.",
    )
    valid_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to the valid split.")
    test_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to the test split.")
    max_train_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Stop adding train documents at this many tokens. Lower it for a smaller store and a faster run.",
    )
    max_valid_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Stop adding valid documents at this many tokens; see min_documents."
    )
    max_test_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Stop adding test documents at this many tokens; see min_documents."
    )
    min_documents: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="The documents that share a limit on valid or test tokens: if the first so many do not fit, each "
        "gives only its beginning, as much of it as makes them fit together. With 1, documents are taken whole, and a "
        "long one may fill the split alone. Default: 20; for a benchmark, whose splits stay as published, 1.",
    )
    max_document_tokens: int | None = Field(
        None, ge=2, le=MAX_TOKENS, description="Cut documents that are longer than this many tokens."
    )
    overlap: Literal["drop", "count", "skip"] | None = Field(
        None,
        description="What to do with valid and test text that also appears in an earlier split: `drop` it, only "
        "`count` it, or `skip` looking for it. Default: drop; for a benchmark, whose splits stay as published, skip.",
    )
    overlap_ngram: int = Field(
        8, ge=2, le=1000, description="Length, in words, of the n-grams by which repeated text is found."
    )
    overlap_limit: float = Field(
        0.5,
        gt=0,
        le=1,
        description="A paragraph of valid or test is dropped when at least this share of its n-grams appears in an "
        "earlier split.",
    )
    drop_train_duplicates: bool = Field(
        False,
        description="By the same rule, drop train paragraphs that repeat an earlier train document. Copies in the "
        "store teach the GNN to rely on copies, which held-out text does not have.",
    )

    @field_validator("encoding")
    @classmethod
    def _text_encoding(cls, name: str) -> str:
        try:
            known = codecs.lookup(name).name
            "a".encode(name)  # an encoding of bytes, such as hex, is refused here
        except (LookupError, ValueError):
            known = None
        if known is None or known.replace("-", "_") in NOT_FILES:
            raise ValueError(f"expected a text encoding that Python knows, such as utf-8 or latin-1 (got {show(name)})")
        return name

    @field_validator("suffixes")
    @classmethod
    def _suffixes(cls, suffixes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for suffix in suffixes or ():
            if not suffix.startswith(".") or len(suffix) < 2 or "/" in suffix or suffix.lower() == ".gz":
                raise ValueError(
                    f"expected ends of file names, each with its dot, such as [.tex, .py] (got {show(suffix)}; .gz of "
                    "each is read as well)"
                )
        return suffixes

    @model_validator(mode="after")
    def _one_way_to_split(self) -> CorpusConfig:
        given = [name for name in ("train", "valid", "test") if getattr(self, name) is not None]
        own_source = self.source not in (None, "python-docs")
        if given and len(given) < 3 and self.dataset is None:
            raise ValueError(f"give train, valid and test together (got only {' and '.join(given)})")
        if self.dataset is not None and own_source:
            raise ValueError("give either source or dataset, not both")
        if given and own_source and not self.is_benchmark:
            raise ValueError("give either source, or train, valid and test, not both")
        if not given and self.source is None and self.dataset is None:
            raise ValueError("there is no text; give source, dataset, or train, valid and test")
        if self.is_benchmark and self.overlap == "drop":
            raise ValueError("the splits of a benchmark stay as published; set overlap to count or skip (got drop)")
        if self.valid_share + self.test_share >= 1:
            raise ValueError(
                f"valid_share and test_share must add up to less than 1, to leave documents for train (got "
                f"{self.valid_share} and {self.test_share})"
            )
        return self

    @property
    def is_benchmark(self) -> bool:
        return self.source in BENCHMARK_NAMES

    @property
    def shared_by(self) -> int:
        """The number of documents that share a limit on valid or test tokens."""
        return self.min_documents or (1 if self.is_benchmark else 20)

    @property
    def overlap_rule(self) -> str:
        return self.overlap or ("skip" if self.is_benchmark else "drop")
