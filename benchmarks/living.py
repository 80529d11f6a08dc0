"""A store that changes: how fast documents come, go and are found, and what removed ones cost until they are compacted.

    python benchmarks/living.py --run runs/demo --tokens 4000

Works on copies of the run, in a temporary folder (`--folder` names another place). Documents of the run's valid split
are added, under other names: real text that the store does not have. Opening is measured on a run of `--rows` rows made
of holes (`large.py`), in a new process.

Each ratio is given twice: of the time that passed, and of the processor's time, which other work on the machine hardly
changes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import Took, arguments, in_a_process, open_run, report, took
from large import grow, opening

from gnnlm.book import book_of
from gnnlm.config import load_config
from gnnlm.datastore.encode import encode_windows, text_windows
from gnnlm.generation import read_current
from gnnlm.library.library import Library
from gnnlm.retrieval.index import Index, keys_of
from gnnlm.run import Run
from gnnlm.run.snapshot import Snapshot

QUERIES, ROUNDS = 32, 3  # looked up one by one, so many times
SHARES = (0.05, 0.2, 0.5)  # of the documents, removed


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="tokens to add (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the run that is opened")
    parser.add_argument("--folder", help="where copies are made (default: a temporary folder)")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(opening(Path(json.loads(given.child)["open"]))))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        run = open_run(given.run)
        rows = [*_changing(run, Path(folder) / "changed", given.tokens)]
        run.copy(Path(folder) / "whole")
        whole = _opened(Path(folder) / "whole")
        for share in SHARES:
            rows += _removing(whole, Path(folder) / f"{share:.0%}", share)
        rows += _opening(run, Path(folder) / "large", given.rows)
    report(f"a store that changes ({given.run})", rows, given.json)


def _changing(made: Run, root: Path, tokens: int) -> list[dict[str, Any]]:
    """Adding, citing, removing, and searching beside a writer."""
    made.copy(root)
    run = Run(load_config(root), reading=True)
    library, texts = Library(run), _texts(run, tokens)
    return [*_adding(run, library, texts), *_writing_beside(root, library, texts)]


def _texts(run: Run, tokens: int) -> dict[str, str]:
    """Documents of valid, up to a number of tokens."""
    stream, found, count = run.snapshot.streams["valid"], dict[str, str](), 0
    for number, name in enumerate(stream.names):
        if count < tokens:
            found[f"added/{name}"] = stream.documents[number].text
            count += len(stream.tokenized(number).tokens)
    return found


def _adding(run: Run, library: Library, texts: dict[str, str]) -> list[dict[str, Any]]:
    first = took(lambda: library.add_texts({"warm-up": next(iter(texts.values()))[:200]}))  # loads the model
    book = book_of(run)
    lm, config = run.snapshot.lm, run.config
    ids = [np.array(lm.tokenize(text)[0]) for text in texts.values()]
    jobs = [job for one in ids for job in text_windows(one, np.arange(len(one) + 1), lm, config.lm)]

    def encode() -> None:
        encode_windows(lm, jobs, config.lm.batch_tokens, config.store.key)

    name = max(texts, key=lambda name: len(texts[name]))
    prompt = texts[name][: len(texts[name]) // 2][-400:]

    def cite() -> None:
        book.refresh()
        written = book.generate(prompt, predictor="knn", only=name, max_tokens=1)
        assert {source.document for source in written.tokens[0].sources} == {name}

    alone = [took(encode)]
    adding = took(lambda: library.add_texts(texts))
    citing = took(cite)
    alone.append(took(encode))  # before and after, as other work on the machine comes and goes
    removing = took(lambda: library.remove(list(texts)))
    encoding = Took(*(sum(each) / 2 for each in zip(*alone, strict=True)))
    both = Took(adding.passed + citing.passed, adding.worked + citing.worked)
    count = {"documents": len(texts), "tokens": sum(map(len, ids))}
    return [
        _row("first add of a process: loads the model and the held-out text", first),
        _row("encode alone", encoding, **count),
        _row("add", adding, encoding, **count),
        _row("refresh, first word with the new source", citing),
        _row("from add to the first word with the new source", both, encoding, **count),
        _row("remove", removing, **count),
    ]


def _writing_beside(root: Path, library: Library, texts: dict[str, str]) -> list[dict[str, Any]]:
    """Single searches alone, and while another process adds documents."""
    opened = _opened(root)
    idle = [_search(opened.index, opened.run)]
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(texts.values()):
            (Path(folder) / f"beside{number}.txt").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "gnnlm", "add", str(root), folder]
        began, worked = time.perf_counter(), _of_children()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        busy = []
        while process.poll() is None:
            busy.append(_search(opened.index, opened.run))
        whole = Took(time.perf_counter() - began, _of_children() - worked)
    assert process.returncode == 0, "gnnlm add failed"
    idle.append(_search(opened.index, opened.run))
    library.remove("beside*")
    return [
        _row("gnnlm add, from start to end, beside searches", whole),
        _row("search, one query", _middle(idle)),
        _row("the same while a writer works", _middle(busy), _middle(idle)),
    ]


def _of_children() -> float:
    """The processor's time of processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _removing(whole: Snapshot, root: Path, share: float) -> list[dict[str, Any]]:
    """Searches with a share of the documents removed, before and after compaction; then erasing.

    They are compared with searches of `whole`, a run that nothing was removed from.
    """
    whole.run.copy(root)
    library = Library(root)
    names, size = [document.name for document in library.documents()], _bytes_served(root, library)
    library.remove(names[: max(1, int(share * len(names)))])
    idle, masked = _alternately(whole, root)
    before = _bytes_served(root, library)
    compacting = took(library.compact)
    still, compacted = _alternately(whole, root)
    after = _bytes_served(root, library)
    erasing = took(lambda: _checked(library.compact(erase=True).as_json()))
    return [
        _row("search, nothing removed", idle, bytes=size),
        _row(f"search, {share:.0%} removed", masked, idle, bytes=before),
        _row(f"compact, {share:.0%} removed", compacting),
        _row(f"search, {share:.0%} removed, compacted", compacted, still, bytes=after),
        _row(f"erase {share:.0%} and look for what is left", erasing),
    ]


def _checked(erased: dict[str, Any]) -> None:
    assert not erased["found"], erased["found"]


def _opening(run: Run, root: Path, rows: int) -> list[dict[str, Any]]:
    grow(run, root, rows)
    best = in_a_process(__file__, [], {"open": str(root)})
    words = f"open {rows:,} rows"
    return [
        _row(f"{words}: store and index", Took(best["seconds"], best["cpu_seconds"]), bytes=best["bytes"]),
        _row(
            f"{words}: network, cache and softmax as well, all but the base model",
            Took(best["ready_seconds"], best["ready_cpu_seconds"]),
            bytes=best["ready_bytes"],
        ),
    ]


def _search(index: Index, run: Run) -> Took:
    """The median time of a single query."""
    keys, k = _queries(run), min(run.config.search.k, len(index))
    index.search(keys[:1], k)
    return _middle([took(lambda key=key: index.search(key[None], k)) for key in keys])


def _alternately(whole: Snapshot, root: Path) -> tuple[Took, Took]:
    """The median time of a single query in a run and in another, asked in turn."""
    other = _opened(root)
    keys, indexes = _queries(whole.run), (whole.index, other.index)
    times: tuple[list[Took], list[Took]] = ([], [])
    for key in [keys[0], *keys.repeat(ROUNDS, 1)]:
        for index, found in zip(indexes, times, strict=True):
            k = min(whole.run.config.search.k, len(index))
            found.append(took(lambda index=index, key=key, k=k: index.search(key[None], k)))
    other.lease.release()
    return _middle(times[0][1:]), _middle(times[1][1:])  # the first loads


def _opened(root: Path) -> Snapshot:
    return Run(load_config(root), reading=True).open_current()


def _queries(run: Run) -> torch.Tensor:
    return torch.from_numpy(keys_of(run.artifact("encode"), "test")[:QUERIES].copy())


def _bytes_served(root: Path, library: Library) -> int:
    """The size of the segments of the current generation."""
    now = read_current(root)
    names = [segment.name for segment in (library.history()[0] if now is None else now).segments]
    return sum(path.stat().st_size for name in names for path in (root / name).rglob("*") if path.is_file())


def _middle(times: list[Took]) -> Took:
    return Took(median(one.passed for one in times), median(one.worked for one in times))


def _row(
    what: str, took: Took, beside: Took | None = None, documents: int = 0, tokens: int = 0, bytes: int = 0
) -> dict[str, Any]:
    return {
        "what": what,
        "milliseconds": 1e3 * took.passed,
        "cpu_milliseconds": 1e3 * took.worked,
        "ratio": None if beside is None else took.passed / beside.passed,
        "cpu_ratio": None if beside is None else took.worked / beside.worked,
        "documents_per_s": documents / took.passed if documents else None,
        "tokens_per_s": tokens / took.passed if tokens else None,
        "megabytes": bytes / 1e6 if bytes else None,
    }


if __name__ == "__main__":
    main()
