"""Examples of what is looked up, in the form of the paper's last table: clear gains and as many clear losses.

Any other test token is found by its document and a character of it (`token_at`).
"""

from __future__ import annotations

import difflib
from typing import Any

from gnnlm.errors import CorpusError
from gnnlm.evaluate.analysis.example_tables import example_table, token_example
from gnnlm.evaluate.analysis.section import Section
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.examples import LEFT, RULE, clear_changes, draw_apart
from gnnlm.predict.predictor import LABELS

COUNT = 5  # of gains, and of losses
NAMED = 5  # documents named in a complaint


def measure(subject: Subject) -> dict[str, Any]:
    test, best = subject.parts.streams["test"], subject.best
    clear = clear_changes(test, subject.scores["base"], subject.scores[best])
    sides = (("gains", clear.gains), ("losses", clear.losses))
    drawn = {name: draw_apart(tokens, subject.document_N, COUNT, subject.seed) for name, tokens in sides}
    return {
        "predictor": best,
        "words": len(clear.words),
        "gains": len(clear.gains),
        "losses": len(clear.losses),
        **{f"drawn_{name}": [token_example(subject, t).as_dict() for t in tokens] for name, tokens in drawn.items()},
    }


def show(found: dict[str, Any]) -> Section:
    label = LABELS[found["predictor"]]
    said = (
        f"Of {found['words']:,} test words, {found['gains']:,} are clear gains of {label} ({RULE}) and "
        f"{found['losses']:,} clear losses (the same, down)."
    )
    tables = [
        example_table(f"examples_{name}", f"Clear {name}, drawn at random", found[f"drawn_{name}"])
        for name in ("gains", "losses")
        if found[f"drawn_{name}"]
    ]
    return Section(
        "examples",
        "Examples",
        [
            said,
            f"Up to {COUNT} of each are drawn at random, no two of one document, among words with at least {LEFT} "
            "tokens before them. The input ends with its gold token; of what was extracted, the next token is "
            "underlined. Any other position: gnnlm analyze RUN --at DOCUMENT:CHARACTER.",
        ],
        tables,
        summary=[said],
    )


def token_at(subject: Subject, place: str) -> int:
    """The number of the test token at DOCUMENT:CHARACTER: a document's name, and an offset into its text."""
    test = subject.parts.streams["test"]
    document, colon, offset = place.rpartition(":")
    if not colon or not document or not (offset.isascii() and offset.isdigit()):
        raise CorpusError(
            f"expected DOCUMENT:CHARACTER, a test document and an offset into its text, such as "
            f"{test.names[0]}:0 (got {place!r})"
        )
    if document not in test.names:
        near = difflib.get_close_matches(document, test.names, n=NAMED, cutoff=0.4) or test.names[:NAMED]
        raise CorpusError(
            f"no test document is named {document!r}; there are {len(test.names)}, such as {', '.join(near)}"
        )
    position = test.position_at(test.names.index(document), int(offset))
    if position is None:
        length = len(test.documents[test.names.index(document)].text)
        raise CorpusError(f"{document} has {length:,} characters in test; expected an offset below that (got {offset})")
    return position - int(test.document_of(position))  # every earlier document has one position more than tokens
