"""The config section of the corpus."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gnnlm.config.section import Section

BENCHMARK_NAMES = ("wikitext-103", "wikitext-2", "one-billion-word", "enwik8")


class CorpusConfig(Section):
    source: str | None = Field(
        "python-docs",
        description="A file or folder of .txt, .md, .rst or .jsonl (or .gz of these), split by document; "
        "`python-docs`, the documentation of the Python that runs; or a benchmark, split as published: "
        "`wikitext-103`, `wikitext-2`, `one-billion-word`, `enwik8`. Null when train, valid and test are given.",
    )
    data_dir: str | None = Field(
        None,
        description="The folder of a benchmark's official files (without it they come from the Hugging Face hub); for "
        "other sources, where relative paths start from. --data-dir sets it.",
    )
    dataset: str | None = Field(
        None,
        description="A Hugging Face dataset instead of a source: a name on the hub or a local path; train, valid and "
        "test then name its splits (default: train, validation, test).",
    )
    dataset_config: str | None = Field(None, description="The dataset's configuration, where it has several.")
    text_column: str = Field("text", description="The dataset's column that holds the text.")
    train: str | None = Field(None, description="File or folder of the train split, when the splits are your own.")
    valid: str | None = Field(None, description="File or folder of the valid split.")
    test: str | None = Field(None, description="File or folder of the test split.")
    documents: Literal["files", "lines"] = Field(
        "files", description="What of a text file is a document: the file, or every line by itself."
    )
    tokens: Literal["lm", "words", "bytes"] = Field(
        "lm",
        description="The base model's own tokens; or, for a model from scratch, words between spaces (each line "
        "ends in `<eos>`), in a vocabulary made from train, or the bytes that occur.",
    )
    min_count: int = Field(1, gt=0, description="A word that train has less often is `<unk>`.")
    encoding: str = Field("utf-8", description="Text encoding of the files.")
    skip_unreadable: bool = Field(False, description="Leave out files that cannot be decoded, with a warning.")
    valid_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to valid.")
    test_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to test.")
    max_train_tokens: int | None = Field(None, gt=0, description="Stop adding train documents at this many tokens.")
    max_valid_tokens: int | None = Field(None, gt=0, description="Stop adding valid documents at this many tokens.")
    max_test_tokens: int | None = Field(None, gt=0, description="Stop adding test documents at this many tokens.")
    max_document_tokens: int | None = Field(None, gt=1, description="Cut longer documents to this many tokens.")
    overlap: Literal["drop", "count", "skip"] | None = Field(
        None,
        description="What becomes of text of valid and test that stands in an earlier split: it is dropped, or only "
        "counted, or not looked for. Default: drop; for a benchmark, whose splits are kept as published, skip.",
    )
    overlap_ngram: int = Field(8, gt=1, description="Words in the n-grams that tell whether text stands twice.")
    overlap_limit: float = Field(
        0.5,
        gt=0,
        le=1,
        description="A paragraph of valid or test is dropped when at least this share of its n-grams occurs in an "
        "earlier split.",
    )
    drop_train_duplicates: bool = Field(
        False,
        description="Drop, by the same rule, train paragraphs that repeat another train document. A store with "
        "copies teaches the GNN to trust copies that held-out text does not have.",
    )

    @model_validator(mode="after")
    def _one_way_to_split(self) -> CorpusConfig:
        given = [name for name in ("train", "valid", "test") if getattr(self, name) is not None]
        own_source = self.source not in (None, "python-docs")
        if given and len(given) < 3 and self.dataset is None:
            raise ValueError(f"give train, valid and test together (got only {', '.join(given)})")
        if self.dataset is not None and own_source:
            raise ValueError("give either source or dataset, not both")
        if given and own_source and not self.is_benchmark:
            raise ValueError("give either source or train, valid and test, not both")
        if not given and self.source is None and self.dataset is None:
            raise ValueError("give source, dataset, or train, valid and test")
        if self.is_benchmark and self.overlap == "drop":
            raise ValueError("a benchmark's splits are kept as published: overlap can be count or skip")
        if self.valid_share + self.test_share >= 1:
            raise ValueError("valid_share + test_share must leave something for train")
        return self

    @property
    def is_benchmark(self) -> bool:
        return self.source in BENCHMARK_NAMES

    @property
    def overlap_rule(self) -> str:
        return self.overlap or ("skip" if self.is_benchmark else "drop")
