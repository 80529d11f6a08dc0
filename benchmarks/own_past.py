"""What a text's own past brings: perplexity of long documents without and with it, under every predictor.

    .venv/bin/python benchmarks/own_past.py [--run runs/demo] [FILE...] [--window 256 --context 64] [--json]

The documents are the files named, or those of the run's test split that are longer than the base model's window. The
demo's corpus cuts its documents; here they are whole. `--window` reads with a smaller window than the run's, so that
documents of moderate length go beyond it; the store, the network and the mix stay as they are. Intervals are of the
change from reading without own past to reading with it, by paired bootstrap over documents.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, open_run, report

from gnnlm.book import open_book
from gnnlm.corpus.python_docs import python_texts
from gnnlm.corpus.text_files import read_text
from gnnlm.errors import ConfigError
from gnnlm.predict.bootstrap import Floats, change_interval
from gnnlm.predict.open_book import OpenBook
from gnnlm.predict.predictor import LABELS, perplexity
from gnnlm.run import Run

SAMPLES = 2000  # of the documents


def documents(run: Run, files: list[str]) -> Iterator[tuple[str, str]]:
    """Names and texts: of the files, or of the test split."""
    if files:
        yield from ((file, read_text(Path(file), "utf-8")) for file in files)
        return
    stream = run.snapshot.streams["test"]
    whole = dict(python_texts()) if run.config.corpus.source == "python-docs" else {}
    for document in stream.documents:
        yield document.name, whole.get(document.name, document.text)


def long_texts(model: OpenBook, texts: Iterator[tuple[str, str]], most: int, count: int) -> list[list[int]]:
    """The first texts that go beyond the window, cut to `most` tokens."""
    found: list[list[int]] = []
    for _, text in texts:
        ids = model.lm.tokenize(text)[0][:most]
        if len(ids) > model.reading.window and len(found) < count:
            found.append(ids)
    if len(found) < 2:
        raise ConfigError(
            f"expected at least 2 documents longer than the window of {model.reading.window} tokens, found "
            f"{len(found)}; name files, or set a smaller --window"
        )
    return found


@torch.inference_mode()
def read(model: OpenBook, ids: list[int], own: bool) -> dict[str, Floats]:
    """The log-probability of every token, by predictor."""
    names = model.predictor.names
    found: dict[str, list[Floats]] = {name: [] for name in names}
    tokens = torch.tensor(ids)
    for prediction, _ in model.read_blocks([ids[:-1]], None, names, own_past=own):
        targets = tokens[prediction.read[0].cpu()]
        for name, values in prediction[0].target_log_probs(targets, names).items():
            found[name].append(values.double().numpy())
    return {name: np.concatenate(values) for name, values in found.items()}


def measure(model: OpenBook, texts: list[list[int]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Each predictor without and with own past, and tokens per second of both."""
    names, seconds = model.predictor.names, {}
    scores: dict[bool, dict[str, Floats]] = {}
    for own in (False, True):
        began = time.perf_counter()
        parts = []
        for number, ids in enumerate(texts, 1):
            parts.append(read(model, ids, own))
            print(f"own past {own}: {number} of {len(texts)} documents", file=sys.stderr, flush=True)
        scores[own] = {name: np.concatenate([part[name] for part in parts]) for name in names}
        seconds["with own past" if own else "without"] = time.perf_counter() - began
    place = np.concatenate([np.arange(len(ids)) for ids in texts])
    document = np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])
    rows = []
    for label, chosen in (("all", place >= 0), ("beyond the window", place >= model.reading.window)):
        for name in names:
            without, with_own = (scores[own][name][chosen] for own in (False, True))
            _, numbers = np.unique(document[chosen], return_inverse=True)
            low, high = change_interval(with_own - without, numbers, SAMPLES, 0) or (np.nan, np.nan)
            before, after = perplexity(-without.mean()), perplexity(-with_own.mean())
            rows.append(
                {
                    "tokens": label,
                    "predictor": LABELS[name],
                    "without": before,
                    "with": after,
                    "change": after / before - 1,
                    "low": low,
                    "high": high,
                }
            )
    return rows, {name: len(place) / took for name, took in seconds.items()}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("files", nargs="*", metavar="FILE", help="documents; without any, those of the test split")
    parser.add_argument("--window", type=int, help="a smaller window than the run's")
    parser.add_argument("--context", type=int, help="tokens that the next window reads again; default: a quarter")
    parser.add_argument("--tokens", type=int, default=3000, help="the most of each document")
    parser.add_argument("--documents", type=int, default=20, help="the most documents")
    given = parser.parse_args()
    model = open_book(given.run).model
    if given.window:
        context = given.window // 4 if given.context is None else given.context
        model = replace(model, reading=replace(model.reading, window=given.window, context=context))
    texts = long_texts(model, documents(open_run(given.run), given.files), given.tokens, given.documents)
    rows, speeds = measure(model, texts)
    counts = f"{len(texts)} documents of {sum(map(len, texts)):,} tokens"
    title = f"{counts}; window {model.reading.window}, context {model.reading.context}"
    percent = ("change", "low", "high")
    shown = [{name: f"{value:+.1%}" if name in percent else value for name, value in row.items()} for row in rows]
    report(title, rows, given.json, shown, documents=len(texts), tokens_per_second=speeds)


if __name__ == "__main__":
    main()
