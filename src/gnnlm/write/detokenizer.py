"""Written tokens to text: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from gnnlm.lm.base_lm import BaseLM

ANCHOR = 8  # tokens of the prompt decoded with the text: a tokenizer may treat a text's first token differently
UNFINISHED = "�"  # how the first bytes of a character are decoded


class Detokenizer:
    """Turns the tokens of a continuation into text; characters that may still change are held back."""

    def __init__(self, lm: BaseLM, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._lm, self._stop = lm, tuple(stop)
        self._ids = list(prompt[-ANCHOR:])
        self._anchor = len(lm.detokenize(self._ids)) if self._ids else 0
        self._first = len(self._ids)
        self._given = 0  # characters returned by `new`
        self._final = 0  # characters that cannot change any more
        self.offsets: list[int] = []  # the character at which each token begins
        self.text = ""
        self._whole = 0  # characters decoded so far, unfinished ones included
        self._settled = 0
        self.stopped = False

    @property
    def settled(self) -> int:
        """How many tokens have their final text."""
        ends = [*self.offsets[1:], self._whole]
        while self._settled < len(self.offsets) and ends[self._settled] <= self._final:
            self._settled += 1
        return self._settled

    @property
    def kept(self) -> int:
        """How many tokens are part of the text; those behind a stop string are not."""
        return sum(offset < len(self.text) for offset in self.offsets) if self.stopped else len(self.offsets)

    def piece(self, place: int) -> str:
        """Return the text of a token; an end token has none."""
        if place >= len(self.offsets):
            return ""
        end = self.offsets[place + 1] if place + 1 < len(self.offsets) else len(self.text)
        return self.text[self.offsets[place] : end]

    def add(self, token: int) -> None:
        """Append a token. None may follow a stop string."""
        self._ids.append(token)
        whole = self._lm.detokenize(self._ids)[self._anchor :]
        self.offsets.append(self._whole)
        self._whole = max(self._whole, len(whole))
        self.text = whole.removesuffix(UNFINISHED) if self._in_a_character(token) else whole
        found = [place for place in (self.text.find(stop, self._searched()) for stop in self._stop) if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
            self.offsets = [min(offset, len(self.text)) for offset in self.offsets]
        self._final = len(self.text) - (0 if found else self._may_become_a_stop())

    def new(self) -> str:
        """Return the text that has become final since the last call."""
        new = self.text[self._given : self._final]
        self._given = max(self._given, self._final)
        return new

    def finish(self) -> str:
        """End the text; return what was held back."""
        if not self.stopped:
            self.text = self._lm.detokenize(self._ids)[self._anchor :]
            self.offsets = [min(offset, len(self.text)) for offset in self.offsets]
        self._final = len(self.text)
        return self.new()

    def _in_a_character(self, token: int) -> bool:
        """Whether the text ends with bytes that may still become a character."""
        tail = b"".join(self._lm.bytes_of(one) for one in self._ids[max(self._first, len(self._ids) - 4) :])[-4:]
        for size in range(1, min(3, len(tail)) + 1):
            lead = tail[-size]
            if lead >= 0xC0:
                return size < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4)
            if lead < 0x80:
                return False
        return False

    def _searched(self) -> int:
        """Return where a stop string that was not found before can begin."""
        return max(0, self._final - max(map(len, self._stop), default=0))

    def _may_become_a_stop(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
