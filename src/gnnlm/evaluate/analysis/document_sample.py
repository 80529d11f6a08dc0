"""Some whole documents of test, drawn at random: for measurements that must search again, and would take long on all.

Shapes: P positions, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.bootstrap import Ints


@dataclass(frozen=True)
class Drawn:
    """Documents of test by number, their positions, ends included, and where their tokens are among all test tokens."""

    documents: Ints
    positions_P: Tensor
    tokens_N: Ints


def draw_documents(subject: Subject, most: int) -> Drawn:
    """Documents with at most so many tokens in all, or one document if none is that short."""
    starts = subject.parts.streams["test"].starts
    documents = fitting(np.diff(starts) - 1, most, subject.seed)
    positions = [torch.arange(int(starts[number]), int(starts[number + 1])) for number in documents]
    tokens = np.flatnonzero(np.isin(subject.document_N, documents))
    return Drawn(documents, torch.cat(positions), tokens)


def fitting(sizes: Ints, most: int, seed: int) -> Ints:
    """Numbers of documents, ascending, drawn in random order, each kept if it still fits; the shortest if none does.

    >>> fitting(np.array([3, 9, 2]), 5, seed=0).tolist(), fitting(np.array([7, 6]), 5, seed=0).tolist()
    ([0, 2], [1])
    """
    chosen, total = list[int](), 0
    for number in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        if total + sizes[number] <= most:
            chosen.append(number)
            total += int(sizes[number])
    return np.array(sorted(chosen) or [int(sizes.argmin())])
