"""What saving searches costs: perplexity and share of searches saved, by how far pointers are followed.

    .venv/bin/python benchmarks/pointers.py [--run runs/demo] [--tokens 3000] [--json]

The first documents of test are read with `search="pointers"` at several settings: `rows` successors are enough for no
search, and the best may be `drop` less similar than the last best. The first row is exact search.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import arguments, open_run, report

from gnnlm.book import open_book
from gnnlm.predict.open_book import BLOCK, OpenBook, Past
from gnnlm.predict.pointers import Pointers

SETTINGS = [
    None,
    Pointers(256, 0.05),
    Pointers(64, 0.1),
    Pointers(16, 0.1),
    Pointers(8, 0.1),
    Pointers(4, 0.2),
    Pointers(1, 1.0),
]


@torch.inference_mode()
def measure(
    book: OpenBook, texts: list[list[int]], pointers: Pointers | None, names: tuple[str, ...]
) -> dict[str, Any]:
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    read = searches = 0
    began = time.perf_counter()
    for ids in texts:
        past: Past | None = None
        for start in range(0, len(ids), BLOCK):
            first = 0 if past is None else start + 1
            part = ids[start : min(start + BLOCK, len(ids) - 1)]
            prediction, past = book.read([part], past, names, pointers=pointers)
            count = int(prediction.real.sum())
            for name, values in prediction[0].target_log_probs(torch.tensor(ids[first : first + count]), names).items():
                scores[name].append(values)
            read += count
        assert past is not None
        searches += past.searches[0]
    seconds = time.perf_counter() - began
    ppl = {f"{name}_ppl": float((-torch.cat(values).double().mean()).exp()) for name, values in scores.items()}
    return {
        "rows": "exact" if pointers is None else pointers.rows,
        "drop": None if pointers is None else pointers.drop,
        "searches_saved": 1 - searches / read,
        **ppl,
        "tokens_per_s": read / seconds,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=3000, help="about how many test tokens are read")
    given = parser.parse_args()
    book, stream = open_book(given.run).model, open_run(given.run).parts.streams["test"]
    texts: list[list[int]] = []
    for start, end in zip(stream.starts[:-1].tolist(), stream.starts[1:].tolist(), strict=True):
        if sum(map(len, texts)) < given.tokens:
            texts.append([int(token) for token in stream.tokens[start : end - 1]])
    names = tuple(name for name in ("knn", "gnn_knn") if name in book.predictor.names)
    rows = [measure(book, texts, pointers, names) for pointers in SETTINGS]
    report(f"{sum(map(len, texts)):,} test tokens", rows, given.json, documents=len(texts))


if __name__ == "__main__":
    main()
