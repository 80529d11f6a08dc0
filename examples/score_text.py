"""Score a text with a finished run, and show the neighbours of the token that gained most.

python examples/score_text.py runs/demo "Return a list of the names in the current local scope."
"""

from __future__ import annotations

import sys

import gnnlm


def main(run: str, text: str) -> None:
    book = gnnlm.open(run)
    scores = book.score(text)
    for name in ("base", "knn", "gnn", "gnn_knn"):
        print(f"{name:8} perplexity {scores.perplexity(name):8.2f}")
    place = int((scores.gnn_knn - scores.base).argmax())
    print(f"\n{scores.tokens[place]!r} gained most; its neighbours:")
    for found in book.neighbors(text, k=3)[place]:
        print(f"  {found.similarity:.3f}  {found.document}: {found.before!r} -> {found.token!r}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
