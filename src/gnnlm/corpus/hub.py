"""Text from Hugging Face datasets, by name or from a local path. The only module that imports `datasets`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from gnnlm.corpus.document import Document, DocumentCollection, SplitDocuments
from gnnlm.corpus.text_files import expanded
from gnnlm.errors import CorpusError

CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps its copies of datasets made by a script


def load_split(name: str, configuration: str | None, split: str, converted: bool = False) -> Any:
    """Load one split of a dataset: a directory made by `save_to_disk`, a folder of data files, or a name on the hub."""
    try:
        import datasets
    except ImportError:
        raise CorpusError("Hugging Face datasets need another package: pip install 'gnnlm[datasets]'") from None
    path = expanded(name)
    try:
        if path.is_dir() and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
            loaded = datasets.load_from_disk(str(path))
            if not isinstance(loaded, dict):
                raise CorpusError(f"{name} has no splits; save it as a DatasetDict with a split {split!r}")
            if split not in loaded:
                raise CorpusError(
                    f"{name} has no split {split!r}, only {', '.join(loaded)}; name its splits with corpus.train, "
                    "corpus.valid and corpus.test"
                )
            return loaded[split]
        if converted:
            return datasets.load_dataset(
                name, data_dir=configuration, split=split, revision=CONVERTED, trust_remote_code=False
            )
        place = str(path) if path.exists() else name
        return datasets.load_dataset(place, configuration, split=split, trust_remote_code=False)
    except CorpusError:
        raise
    except Exception as error:  # datasets raises many kinds of errors
        reason = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") and not os.path.exists(path) else error
        raise CorpusError(
            f"dataset {name}, split {split!r} cannot be loaded: {' '.join(str(reason).split())[:200]}; check its name "
            "and the connection"
        ) from error


def read_dataset(name: str, configuration: str | None, column: str, splits: dict[str, str]) -> SplitDocuments:
    """Return the rows of each split as documents."""
    made = {}
    for ours, theirs in splits.items():
        rows = load_split(name, configuration, theirs)
        if column not in rows.column_names:
            raise CorpusError(
                f"dataset {name} has no column {column!r}; set corpus.text_column to one of "
                f"{', '.join(rows.column_names)}"
            )
        if getattr(rows.features[column], "dtype", None) not in ("string", "large_string"):
            raise CorpusError(
                f"column {column!r} of dataset {name} does not hold text but {rows.features[column]}; set "
                "corpus.text_column to one that does"
            )
        made[ours] = DocumentCollection(len(rows), _documents(rows, column, theirs))
    return made


def _documents(rows: Any, column: str, split: str) -> Callable[[], Iterator[Document]]:
    def documents() -> Iterator[Document]:
        for number, row in enumerate(rows):
            title = next((str(row[key]) for key in ("name", "title", "id") if row.get(key) is not None), str(number))
            if row[column] and row[column].strip():
                yield Document(f"{split}:{title}", row[column])

    return documents


def dataset_fingerprint(name: str, configuration: str | None, splits: dict[str, str]) -> str:
    """Return the fingerprints that `datasets` computes of the splits."""
    parts = [load_split(name, configuration, split)._fingerprint for split in splits.values()]
    return " ".join(parts)


def hub_lines(
    benchmark: str, repository: str, configuration: str, converted: bool, split: str, only: range | None = None
) -> Callable[[], Iterator[str]]:
    """Yield the lines of a benchmark's split, or some of them, from the hub."""
    try:
        rows = load_split(repository, configuration, split, converted)
    except CorpusError as error:
        raise CorpusError(
            f"{benchmark} could not be downloaded from the hub ({error}); give the folder of its official files with "
            "--data-dir"
        ) from error

    if only is not None:
        rows = rows.select(range(min(only.start, len(rows)), min(only.stop, len(rows))))

    def lines() -> Iterator[str]:
        for row in rows:
            yield row["text"].removesuffix("\n")

    return lines
