"""gnnlm: open-book language models.

    import gnnlm
    book = gnnlm.open("runs/demo")
    book.score("Return a new list.")       # log-probabilities under the four predictors
    book.neighbors("Return a new list.")   # what each token looked up, and where that text is
    book.generate("Return a new")          # a continuation, with a source for every word
    gnnlm.Library("runs/demo").add("notes.txt")  # one more document; book.refresh() sees it
    lm = gnnlm.load_lm("runs/x/lm")        # a base model alone: encode(tokens), log_probs(states)

Importing this package is light: nothing heavy is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnlm.errors import GnnlmError

if TYPE_CHECKING:
    from gnnlm.book import Book, open_book as open  # noqa: I001
    from gnnlm.library.library import Library
    from gnnlm.lm.load_lm import load_lm

__all__ = ["Book", "GnnlmError", "Library", "load_lm", "open"]
__version__ = "0.3.0"

_LAZY = {
    "Book": ("gnnlm.book", "Book"),
    "open": ("gnnlm.book", "open_book"),
    "Library": ("gnnlm.library.library", "Library"),
    "load_lm": ("gnnlm.lm.load_lm", "load_lm"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
