"""Examples of retrieved neighbours, in the style of the paper's last table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich.text import Text

from gnnlm.corpus.stream import Passage, Stream
from gnnlm.datastore.store import Store
from gnnlm.predict.score import SearchedText

LEFT, RIGHT = 14, 6  # tokens shown before and after the one that is predicted
NEAREST = 3  # retrieved passages shown
CLEAR_NATS, CLEAR_PROBABILITY = 1.0, 0.2  # by how much a word's log-probability and probability rise in a clear gain


@dataclass(frozen=True)
class Example:
    """A test token and the passages retrieved for it, each with a remark."""

    query: tuple[Passage, str]
    neighbours: list[tuple[Passage, str]]


@dataclass(frozen=True)
class Examples:
    """Some of the clear gains among the test words; how many there are, and how many clear losses."""

    drawn: list[Example]
    words: int
    gains: int
    losses: int


def find_examples(
    searched: SearchedText,
    test: Stream,
    store: Store,
    base: npt.NDArray[np.float32],
    best: npt.NDArray[np.float32],
    count: int,
    seed: int,
) -> Examples:
    """Draw test words at random among those that retrieval clearly helped, one per document, with their nearest rows.

    `base` and `best` are the log-probabilities of each test token. Words with little text before them are left out.
    """
    positions = np.flatnonzero(np.asarray(test.tokens) >= 0)
    late = positions - test.starts[test.document_of(positions)] >= LEFT  # before that, the reason cannot be seen
    words = [i for i in np.flatnonzero(late) if test.text_between(positions[i], positions[i] + 1).strip().isalpha()]
    gains = [i for i in words if is_clear_gain(base[i], best[i])]
    losses = sum(is_clear_gain(best[i], base[i]) for i in words)
    drawn: dict[int, Example] = {}
    for place in np.random.default_rng(seed).permutation(gains).astype(np.int64):
        position = int(positions[place])
        number = int(test.document_of(position))
        if len(drawn) == count:
            break
        if number not in drawn:
            drawn[number] = _example(searched, test, store, position, np.exp(base[place]), np.exp(best[place]))
    return Examples(list(drawn.values()), len(words), len(gains), losses)


def is_clear_gain(before: float, after: float) -> bool:
    """Whether a log-probability rose so far that a reader will see why.

    >>> is_clear_gain(np.log(0.1), np.log(0.5)), is_clear_gain(np.log(0.6), np.log(0.9)), is_clear_gain(-9.0, -6.0)
    (True, False, False)
    """
    return bool(after - before >= CLEAR_NATS and np.exp(after) - np.exp(before) >= CLEAR_PROBABILITY)


def _example(searched: SearchedText, test: Stream, store: Store, position: int, before: float, after: float) -> Example:
    nearest = searched.table.at(torch.tensor([position]), NEAREST)[0]
    found = [
        (store.passage(row, LEFT, RIGHT), f"similarity {score:.3f}")
        for row, score in zip(nearest.positions.tolist(), nearest.similarity.tolist(), strict=True)
        if row >= 0
    ]
    return Example((test.passage(position, LEFT, 0), f"p {before:.3f} -> {after:.3f}"), found)


def render_choice(examples: Examples) -> str:
    """How the examples were chosen, in a sentence or two."""
    rule = f"probability up by {CLEAR_PROBABILITY:g} or more and by a factor of e or more"
    if not examples.gains:
        return f"No examples: none of {examples.words:,} test words is a clear gain ({rule})."
    return (
        f"Examples drawn at random among {examples.gains:,} clear gains of {examples.words:,} test words ({rule}); "
        f"{examples.losses:,} words lost as much."
    )


def render_example(example: Example) -> Text:
    """The input with its gold token in **bold**, then the retrieved passages with their next token _underlined_.

    The marks stay in the text, for output without styles.
    """
    text = Text()
    lines = [("Input", example.query, "bold", "**")]
    lines += [(f"Extracted {i}", found, "underline", "_") for i, found in enumerate(example.neighbours, start=1)]
    for label, (passage, remark), style, mark in lines:
        token = _flat(passage.token)
        space = token[: len(token) - len(token.lstrip())]
        text.append(f"\n{label}: ", style="italic")
        text.append(_flat(passage.before) + space)
        text.append(f"{mark}{token.strip()}{mark}", style=style)
        text.append(_flat(passage.after))
        text.append(f"   [{passage.document}, {remark}]", style="dim")
    return text


def _flat(text: str) -> str:
    return "".join(" " if c.isspace() else c for c in text)
