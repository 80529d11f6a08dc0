"""BM25 as it is written in the book, one passage and one token of the query at a time (Lucene's idf)."""

from __future__ import annotations

import math


def bm25_score(passages: list[list[int]], number: int, query: list[int], k1: float = 1.5, b: float = 0.75) -> float:
    """The score of one passage."""
    passage, average = passages[number], sum(len(passage) for passage in passages) / len(passages)
    total = 0.0
    for token in query:
        having = sum(token in other for other in passages)
        often = passage.count(token)
        idf = math.log(1 + (len(passages) - having + 0.5) / (having + 0.5))
        total += idf * often / (often + k1 * (1 - b + b * len(passage) / average))
    return total
