"""What part of a word each token is, decided from the text."""

from __future__ import annotations

from gnnlm.corpus.stream import Stream

BEGINS, CONTINUES, DIGITS, OTHER = "begins a word", "continues a word", "digits", "punctuation or space"
KINDS = (BEGINS, CONTINUES, DIGITS, OTHER)
APOSTROPHES = "'’"


def kind_of(text: str, start: int, end: int) -> str:
    """The kind of the token text[start:end].

    A token with a letter begins a word unless a letter or a digit stands right before its first letter; an apostrophe
    within a word belongs to the word. A token without text is a byte of a character and counts as that character.

    >>> text = "isn't x2, 42"
    >>> [kind_of(text, *where) for where in ((0, 3), (3, 5), (5, 7), (7, 8), (8, 9), (9, 12))]
    ['begins a word', 'continues a word', 'begins a word', 'digits', 'punctuation or space', 'digits']
    """
    piece = text[start : max(end, start + 1)]
    letter = next((place for place, c in enumerate(piece) if c.isalpha()), None)
    if letter is None:
        return DIGITS if any(c.isdigit() for c in piece) else OTHER
    at = start + letter
    if at and text[at - 1] in APOSTROPHES:
        at -= 1
    return CONTINUES if at and text[at - 1].isalnum() else BEGINS


def kinds_of(stream: Stream) -> list[str]:
    """The kind of every token of a split, ends of documents left out."""
    kinds = []
    for number, document in enumerate(stream.documents):
        first, last = stream.starts[number : number + 2].tolist()
        kinds += [kind_of(document.text, *stream.characters(position)) for position in range(first, last - 1)]
    return kinds
