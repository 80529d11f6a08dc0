"""gnnlm: open-book language models.

    import gnnlm
    book = gnnlm.open("runs/demo")
    book.score("Return a new list.")       # log-probabilities under the four predictors
    book.neighbors("Return a new list.")   # what each token looked up, and where it stands

Importing this package is light: nothing heavy is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnlm.errors import GnnlmError

if TYPE_CHECKING:
    from gnnlm.book import Book, open_book as open  # noqa: I001

__all__ = ["Book", "GnnlmError", "open"]
__version__ = "0.1.0"

_LAZY = {"Book": "Book", "open": "open_book"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from gnnlm import book

        return getattr(book, _LAZY[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
