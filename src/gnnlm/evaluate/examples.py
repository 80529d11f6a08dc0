"""Examples of retrieved neighbours, in the style of the paper's last table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.text import Text

from gnnlm.corpus.stream import Passage, Stream
from gnnlm.datastore.store import Store
from gnnlm.predict.predictor import LABELS
from gnnlm.predict.split_scoring import SearchedText

LEFT, RIGHT = 14, 6  # tokens shown before and after the one that is predicted
NEAREST = 3  # retrieved passages shown
CLEAR_NATS, CLEAR_PROBABILITY = 1.0, 0.2  # by how much a word's log-probability and probability rise in a clear gain
SPACES = {"\n": "⏎", "\t": "⇥"}
PART = "(part of a character)"  # a token without text of its own
RULE = f"probability up by {CLEAR_PROBABILITY:g} or more and by a factor of e or more"
Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RetrievedPassage:
    """A passage, and whether its next token is `right`: the one to predict."""

    passage: Passage
    similarity: float
    right: bool


@dataclass(frozen=True)
class Example:
    """A test token, its probability under some predictors, and the passages retrieved for it."""

    query: Passage
    probabilities: Mapping[str, float]
    neighbours: Sequence[RetrievedPassage]

    @property
    def remark(self) -> str:
        """The probabilities: two as a change, more by name."""
        if len(self.probabilities) == 2:
            return "p " + " -> ".join(map(probability, self.probabilities.values()))
        return ", ".join(f"{LABELS[name]} {probability(p)}" for name, p in self.probabilities.items())


@dataclass(frozen=True)
class Examples:
    """Some of the clear gains among the test words; how many there are, and how many clear losses."""

    sample: list[Example]
    words: int
    gains: int
    losses: int


@dataclass(frozen=True)
class ClearChanges:
    """Numbers of test tokens: the words with enough text before them, those clearly helped, those clearly hurt."""

    words: Ints
    gains: Ints
    losses: Ints


def clear_changes(test: Stream, base: Floats, best: Floats) -> ClearChanges:
    """Which test words retrieval clearly helped or hurt, from the log-probabilities of each test token."""
    positions = np.flatnonzero(np.asarray(test.tokens) >= 0)
    late = positions - test.starts[test.document_of(positions)] >= LEFT  # before that, the reason cannot be seen
    words = [i for i in np.flatnonzero(late) if test.text_between(positions[i], positions[i] + 1).strip().isalpha()]
    gains = [i for i in words if is_clear_gain(base[i], best[i])]
    losses = [i for i in words if is_clear_gain(best[i], base[i])]
    return ClearChanges(np.array(words, np.int64), np.array(gains, np.int64), np.array(losses, np.int64))


def draw_apart(tokens: Ints, document_N: Ints, count: int, seed: int) -> list[int]:
    """Some of the tokens, drawn at random, no two of one document.

    >>> draw_apart(np.array([0, 1, 2]), np.array([0, 0, 1]), 3, seed=0)
    [2, 0]
    """
    by_document: dict[int, int] = {}
    for token in np.random.default_rng(seed).permutation(tokens).astype(np.int64):
        if len(by_document) == count:
            break
        by_document.setdefault(int(document_N[token]), int(token))
    return list(by_document.values())


def find_examples(
    searched: SearchedText, test: Stream, store: Store, base: Floats, best: Floats, count: int, seed: int
) -> Examples:
    """Draw test words at random among those that retrieval clearly helped, one per document, with their nearest rows.

    `base` and `best` are the log-probabilities of each test token. Words with little text before them are left out.
    """
    clear = clear_changes(test, base, best)
    positions = np.flatnonzero(np.asarray(test.tokens) >= 0)
    sample = [
        example_at(searched, test, store, int(positions[i]), {"before": math.exp(base[i]), "after": math.exp(best[i])})
        for i in draw_apart(clear.gains, test.document_of(positions), count, seed)
    ]
    return Examples(sample, len(clear.words), len(clear.gains), len(clear.losses))


def is_clear_gain(before: float, after: float) -> bool:
    """Whether a log-probability rose so far that a reader will see why.

    >>> is_clear_gain(np.log(0.1), np.log(0.5)), is_clear_gain(np.log(0.6), np.log(0.9)), is_clear_gain(-9.0, -6.0)
    (True, False, False)
    """
    return bool(after - before >= CLEAR_NATS and np.exp(after) - np.exp(before) >= CLEAR_PROBABILITY)


def example_at(
    searched: SearchedText,
    test: Stream,
    store: Store,
    position: int,
    probabilities: Mapping[str, float],
    count: int = NEAREST,
) -> Example:
    """The test token at a position, and the nearest rows that were retrieved for it."""
    nearest = searched.table.at(torch.tensor([position]), count)[0]
    target = int(test.tokens[position])
    found = [
        RetrievedPassage(store.passage(row, LEFT, RIGHT), score, int(store.tokens(torch.tensor([row]))) == target)
        for row, score in zip(nearest.positions.tolist(), nearest.similarity.tolist(), strict=True)
        if row >= 0
    ]
    return Example(test.passage(position, LEFT, 0), probabilities, found)


def render_choice(examples: Examples) -> str:
    """How the example was chosen, in a sentence or two."""
    if not examples.gains:
        return f"No examples: none of {examples.words:,} test words is a clear gain ({RULE})."
    return (
        f"An example, drawn at random among {examples.gains:,} clear gains of {examples.words:,} test words ({RULE}); "
        f"{examples.losses:,} words lost as much."
    )


def render_example(example: Example) -> Text:
    """The input with its gold token in **bold**, then the retrieved passages with their next token _underlined_.

    The marks stay in the text, for output without styles.
    """
    text = Text()
    lines = [("Input", example.query, example.remark, "bold", "**")]
    for number, found in enumerate(example.neighbours, start=1):
        lines.append((f"Extracted {number}", found.passage, f"similarity {found.similarity:.3f}", "underline", "_"))
    for label, passage, remark, style, mark in lines:
        before, token, after = parts_of(passage)
        text.append(f"\n{label}: ", style="italic")
        text.append(before)
        text.append(f"{mark}{token}{mark}", style=style)
        text.append(after)
        text.append(f"   [{flat(passage.document)}, {remark}]", style="dim")
    return text


def probability(p: float) -> str:
    """
    >>> probability(0.0491), probability(0.000021)
    ('0.049', '2.1e-05')
    """
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def parts_of(passage: Passage) -> tuple[str, str, str]:
    """The text before a token, the token and the text after it, on one line; the token without space around it.

    >>> parts_of(Passage("d", "in the", " next\\n", "line")), parts_of(Passage("d", "end.", "\\n\\n", "Next"))
    (('in the ', 'next', ' line'), ('end.', '⏎⏎', 'Next'))
    """
    token = flat(passage.token)
    if not token.strip():
        return flat(passage.before), "".join(SPACES.get(c, "␣") for c in passage.token) or PART, flat(passage.after)
    left, right = len(token) - len(token.lstrip()), len(token.rstrip())
    return flat(passage.before) + token[:left], token.strip(), token[right:] + flat(passage.after)


def flat(text: str) -> str:
    """Text on one line; what cannot be printed, such as control characters, is replaced."""
    return "".join(" " if c.isspace() else c if c.isprintable() else "\ufffd" for c in text)
