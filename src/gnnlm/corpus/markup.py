"""The visible text of HTML. Knows nothing of files."""

from __future__ import annotations

import re
from html.parser import HTMLParser

MAX_UNFINISHED = 1000  # tags behind one that never ends: html.parser takes quadratic time over them
HIDDEN = {"script", "style"}
PARAGRAPHS = {
    "address", "article", "aside", "blockquote", "details", "dl", "fieldset", "figure", "footer", "form", "h1", "h2",
    "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre", "section", "table", "title", "ul",
}  # fmt: skip
LINES = {
    "body", "caption", "dd", "div", "dt", "figcaption", "head", "html", "legend", "li", "option", "summary", "tbody",
    "tfoot", "thead", "tr",
}  # fmt: skip
CELLS = {"td", "th"}


def html_text(markup: str) -> str:
    """Return the text that a browser would show: no scripts or styles, and block elements end lines.

    A paragraph, a heading or a list is followed by an empty line; spaces and newlines count as one space, except in
    `pre`.

    >>> html_text("<h1>A</h1><p>One &amp; two<br>three<script>x()</script> <b>four</b></p>")
    'A\\n\\nOne & two\\nthree four\\n'
    """
    reader = _Reader()
    try:
        reader.feed(markup)
        if reader.rawdata.count("<") > MAX_UNFINISHED:
            raise ValueError
        reader.close()
    except (AssertionError, ValueError) as error:  # how html.parser refuses malformed declarations and characters
        raise ValueError("malformed markup") from error
    return reader.text()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._hidden = self._preformatted = 0  # how many such elements are open
        self._breaks = 0
        self._space = False  # what is due before the next word

    def text(self) -> str:
        lines = re.sub(r"\n{3,}", "\n\n", "".join(self._parts)).strip("\n")
        return f"{lines}\n" if lines else ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._boundary(tag)
        self._hidden += tag in HIDDEN
        self._preformatted += tag == "pre"
        if tag == "br":
            self._breaks = min(2, self._breaks + 1)

    def handle_endtag(self, tag: str) -> None:
        self._boundary(tag)
        self._hidden = max(0, self._hidden - (tag in HIDDEN))
        self._preformatted = max(0, self._preformatted - (tag == "pre"))

    def _boundary(self, tag: str) -> None:
        self._breaks = max(self._breaks, 2 if tag in PARAGRAPHS else int(tag in LINES))
        self._space = self._space or tag in CELLS

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._preformatted:
            self._write(data)
            return
        self._space = self._space or data[:1].isspace()
        words = data.split()
        if words:
            self._write(" ".join(words))
            self._space = data[-1].isspace()

    def _write(self, text: str) -> None:
        if self._parts:
            self._parts.append("\n" * self._breaks or " " * self._space)
        self._parts.append(text)
        self._breaks = 0
        self._space = False
