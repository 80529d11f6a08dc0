"""A store that changes: how fast documents come, go and are found, and what removed ones cost until they are compacted.

    python benchmarks/living.py --run runs/demo --tokens 4000

Works on a copy of the run, in a temporary folder (`--folder` names another place). Documents of the run's valid split
are added, under other names: real text that the store does not have.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import arguments, open_run, report

from gnnlm.book import Book, open_book
from gnnlm.config import load_config
from gnnlm.datastore.encode import encode_jobs, plan_jobs
from gnnlm.generation import read_current
from gnnlm.library.library import Library
from gnnlm.retrieval.index import keys_of
from gnnlm.run import Run

QUERIES = 32  # looked up one by one
SHARES = (0.05, 0.2, 0.5)  # of the documents, removed


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="tokens to add (default: %(default)s)")
    parser.add_argument("--folder", help="where the copy is made (default: a temporary folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        root = Path(folder) / "run"
        open_run(given.run).copy(root)
        run = Run(load_config(root), reading=True)
        library, texts = Library(run), _texts(run, given.tokens)
        rows = [*_adding(run, library, texts), *_writing_beside(root, library, texts), *_removing(root, library)]
    report(f"a store that changes ({given.run})", rows, given.json)


def _texts(run: Run, tokens: int) -> dict[str, str]:
    """Documents of valid, up to a number of tokens."""
    stream, found, count = run.parts.streams["valid"], dict[str, str](), 0
    for number, name in enumerate(stream.names):
        if count < tokens:
            found[f"added/{name}"] = stream.documents[number]["text"]
            count += len(stream.tokenized(number).tokens)
    return found


def _adding(run: Run, library: Library, texts: dict[str, str]) -> list[dict[str, Any]]:
    library.add_texts({"warm-up": next(iter(texts.values()))[:200]})  # loads the model
    book = open_book(run.root)
    lm, config = run.parts.lm, run.config
    ids = [np.array(lm.tokenize(text)[0]) for text in texts.values()]
    jobs = [job for one in ids for job in plan_jobs(one, np.arange(len(one) + 1), lm, config.lm)]
    encoding = _seconds(lambda: encode_jobs(lm, jobs, config.lm.batch_tokens, config.store.key))
    began = time.perf_counter()
    change = library.add_texts(texts)
    book.refresh()
    name = max(texts, key=lambda name: len(texts[name]))
    prompt = texts[name][: len(texts[name]) // 2][-400:]
    written = book.generate(prompt, predictor="knn", only=name, max_tokens=1)
    cited = time.perf_counter() - began
    assert {source.document for source in written.tokens[0].sources} <= {name}
    tokens = sum(map(len, ids))
    before = time.perf_counter()
    removed = library.remove(list(texts))
    gone = time.perf_counter() - before
    return [
        _row("encode alone", encoding, documents=len(texts), tokens=tokens),
        _row("add", change.seconds, encoding, documents=len(texts), tokens=tokens),
        _row("add, refresh, first word with the new source", cited, encoding, documents=len(texts), tokens=tokens),
        _row("remove", gone, documents=len(removed.removed), tokens=tokens),
    ]


def _writing_beside(root: Path, library: Library, texts: dict[str, str]) -> list[dict[str, Any]]:
    """Single searches alone, and while another process adds documents."""
    book = open_book(root)
    idle = _search_ms(book, library.run)
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(texts.values()):
            (Path(folder) / f"beside{number}.txt").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "gnnlm", "add", str(root), folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = []
        while process.poll() is None:
            found.append(_search_ms(book, library.run))
    assert process.returncode == 0, "gnnlm add failed"
    library.remove("beside*")
    busy = median(found)
    return [_row("search, one query", idle / 1e3), _row("the same while a writer works", busy / 1e3, idle / 1e3)]


def _removing(root: Path, library: Library) -> list[dict[str, Any]]:
    rows, whole = [], open_book(root)
    idle, size = _search_ms(whole, library.run), _bytes_served(root, library)
    names = [document.name for document in whole.documents]
    rows.append(_row("search, nothing removed", idle / 1e3, bytes=size))
    gone = 0
    for share in SHARES:
        some = names[gone : max(gone + 1, int(share * len(names)))]
        gone += len(some)
        library.remove(some)
        whole.refresh()
        masked = _search_ms(whole, library.run)
        rows.append(_row(f"search, {share:.0%} removed", masked / 1e3, idle / 1e3, bytes=_bytes_served(root, library)))
    began = time.perf_counter()
    library.compact()
    took = time.perf_counter() - began
    whole.refresh()
    rows.append(_row("compact", took))
    rows.append(
        _row("search, compacted", _search_ms(whole, library.run) / 1e3, idle / 1e3, bytes=_bytes_served(root, library))
    )
    began = time.perf_counter()
    erased = library.compact(erase=True, readers=[whole])
    rows.append(
        _row("erase and look for what is left", time.perf_counter() - began, bytes=_bytes_served(root, library))
    )
    assert not erased.as_json()["found"]
    return rows


def _search_ms(book: Book, run: Run) -> float:
    """The median time of a single query, milliseconds."""
    keys = torch.from_numpy(keys_of(run.artifact("encode"), "test")[:QUERIES].copy())
    k = min(run.config.search.k, len(book.model.index))
    book.model.index.search(keys[:1], k)
    times = []
    for key in keys:
        began = time.perf_counter()
        book.model.index.search(key[None], k)
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def _bytes_served(root: Path, library: Library) -> int:
    """The size of the segments of the current generation."""
    now = read_current(root)
    names = [segment.name for segment in (library.history()[0] if now is None else now).segments]
    return sum(path.stat().st_size for name in names for path in (root / name).rglob("*") if path.is_file())


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _row(
    what: str, seconds: float, beside: float | None = None, documents: int = 0, tokens: int = 0, bytes: int = 0
) -> dict[str, Any]:
    return {
        "what": what,
        "milliseconds": 1e3 * seconds,
        "ratio": None if beside is None else seconds / beside,
        "documents_per_s": documents / seconds if documents else None,
        "tokens_per_s": tokens / seconds if tokens else None,
        "megabytes": bytes / 1e6 if bytes else None,
    }


if __name__ == "__main__":
    main()
