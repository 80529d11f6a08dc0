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


@dataclass(frozen=True)
class Example:
    """A test token and the passages retrieved for it, each with a remark."""

    query: tuple[Passage, str]
    neighbours: list[tuple[Passage, str]]


def find_examples(
    searched: SearchedText,
    test: Stream,
    store: Store,
    base: npt.NDArray[np.float32],
    best: npt.NDArray[np.float32],
    count: int,
) -> list[Example]:
    """The test words whose probability rose most through retrieval, one per document, with their nearest rows.

    `base` and `best` are the log-probabilities of each test token.
    """
    positions = np.flatnonzero(np.asarray(test.tokens) >= 0)
    examples: list[Example] = []
    used: set[int] = set()
    for place in np.argsort(np.exp(base) - np.exp(best)):
        position = int(positions[place])
        number = int(test.document_of(position))
        early = position - int(test.starts[number]) < LEFT  # too little context to see the reason
        if early or number in used or not test.text_between(position, position + 1).strip().isalpha():
            continue
        used.add(number)
        gain = f"p {np.exp(base[place]):.3f} -> {np.exp(best[place]):.3f}"
        nearest = searched.table.at(torch.tensor([position]), 3)[0]
        found = [
            (store.passage(row, LEFT, RIGHT), f"similarity {score:.3f}")
            for row, score in zip(nearest.positions.tolist(), nearest.similarity.tolist(), strict=True)
            if row >= 0
        ]
        examples.append(Example((test.passage(position, LEFT, 0), gain), found))
        if len(examples) == count:
            break
    return examples


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
