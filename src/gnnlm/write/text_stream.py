"""One text, given out while it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnnlm.errors import ConfigError
from gnnlm.write.attribution import written_text
from gnnlm.write.batch_loop import Writer
from gnnlm.write.text_state import TextSettings, TextState
from gnnlm.write.written_text import WrittenText


class TextStream:
    """A text as it is written: iterating yields pieces of whole characters; then `generation` has everything."""

    def __init__(self, writer: Writer, prompt: Sequence[int], settings: TextSettings) -> None:
        self._writer = writer
        self._prompt = prompt
        self._settings = settings
        self.state: TextState | None = None

    def __iter__(self) -> Iterator[str]:
        (self.state,) = self._writer.add(self._prompt, self._settings)
        while self._writer.busy:
            self._writer.step()
            if new := self.state.detokenizer.new():
                yield new
        if rest := self.state.detokenizer.finish():
            yield rest

    @property
    def generation(self) -> WrittenText:
        """The text so far, with its sources; `finish_reason` is `interrupted` if it is not finished."""
        if self.state is None:
            raise ConfigError("nothing has been written yet; iterate over the stream first")
        return written_text(self._writer.model, self.state, self._settings.options.sources)
