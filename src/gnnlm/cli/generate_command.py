"""gnnlm generate: write on from a prompt, with a source for every word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gnnlm.cli.lookup_commands import Attach, Exclude, Only, RunPath, flat
from gnnlm.cli.model_options import with_options
from gnnlm.cli.options import out
from gnnlm.errors import Interrupted
from gnnlm.write.generate_options import GenerateOptions, TextOptions

if TYPE_CHECKING:
    from gnnlm.write.text_stream import TextStream
    from gnnlm.write.written_text import WrittenText

OPTIONS = [  # all but `sources`: the command always shows the same number of them
    name for name in (*GenerateOptions.__annotations__, *TextOptions.model_fields) if name != "sources"
]
LISTED = 8  # sources under a text
QUOTED = 60  # characters of a source that are shown
LEAST = 0.05  # a source with less of a word is not listed


def _checked(values: dict[str, Any]) -> GenerateOptions:
    """Return options from the command line's values."""
    turned_off = {name.removeprefix("no_"): not value for name, value in values.items() if name.startswith("no_")}
    named = {name: value for name, value in values.items() if value is not None and not name.startswith("no_")}
    return GenerateOptions.checked(**named, **turned_off)


@with_options(GenerateOptions, OPTIONS)
def generate(
    run: RunPath,
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT...", help="The text to go on from, or several; '' starts a text."),
    ],
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    only: Only = None,
    exclude: Exclude = None,
    attach: Attach = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line; with several texts, one line each.")
    ] = False,
    **values: Any,
) -> None:
    """Write on from a prompt, with a source for every word."""
    from gnnlm.book import open_book  # loads torch

    options = _checked(values)  # refuses bad values before anything is loaded
    book = open_book(run)
    shared: dict[str, Any] = {"only": only, "exclude": exclude, "chat": chat, "attach": attach, **options.model_dump()}
    if as_json:
        for written in book.generate(prompts, **shared):
            print(json.dumps(written.as_json()))
        return
    if len(prompts) == options.n == 1:
        show_stream(prompts[0], book.stream(prompts[0], **shared))
        return
    labels = [prompt for prompt in prompts for _ in range(options.n)]
    for prompt, written in zip(labels, book.generate(prompts, **shared), strict=True):
        show(prompt, written)


def show_stream(prompt: str, stream: TextStream) -> None:
    """Print a text as it is written; Ctrl-C ends the text there."""
    out.print(Text(prompt, "bold"), end="", soft_wrap=True)
    shown = 0
    try:
        for piece in stream:
            out.print(_coloured(stream, shown, shown + len(piece)), end="", soft_wrap=True)
            shown += len(piece)
    except (KeyboardInterrupt, Interrupted):
        if stream.state is None:
            raise
    out.print()
    _show_sources(stream.generation)


def show(prompt: str, written: WrittenText, sources: int = LISTED) -> None:
    """Print a finished text with its largest sources."""
    text = Text(prompt, "bold")
    for token in written.tokens:
        text.append(token.text, share_style(token.book))
    out.print(text, soft_wrap=True)
    _show_sources(written, sources)


def write_two_sentences(run: Path, prompts: list[str]) -> None:
    """Write the sentences that `gnnlm demo` ends with, with few sources each, so that all of it fits on a screen."""
    from gnnlm.book import open_book

    book = open_book(run)
    for prompt in prompts:
        show(prompt, book.generate(prompt, max_tokens=40, stop=["\n\n"]), sources=2)


def share_style(share: float) -> str:
    """Return a colour for the share of the book: plain for none, then blue to magenta.

    >>> share_style(0.0), share_style(1.0)
    ('', 'rgb(215,0,215)')
    """
    if share < 0.05:
        return ""
    return f"rgb({round(215 * share)},{round(95 * (1 - share))},215)"


def _coloured(stream: TextStream, start: int, end: int) -> Text:
    """Return characters of the text, each in the colour of its token."""
    assert stream.state is not None
    detokenizer = stream.state.detokenizer
    text = Text()
    offsets = [*detokenizer.offsets, len(detokenizer.text)]
    for number, token in enumerate(stream.state.tokens[: len(offsets) - 1]):
        first = max(start, offsets[number])
        last = min(end, offsets[number + 1])
        if first < last:
            text.append(detokenizer.text[first:last], share_style(float(token.voters.share.sum())))
    return text


def _show_sources(written: WrittenText, most: int = LISTED) -> None:
    """Print the passages that the text follows, then the largest sources of single words, and the share of the book."""
    lines = [
        _source_line(
            span.document, span.start, span.end, f'"{_cut(span.text)}"', f"{span.tokens} tokens, {span.share:.0%}"
        )
        for span in sorted(written.spans, key=lambda span: -span.tokens * span.share)
    ]
    inside = {place for span in written.spans for place in range(span.first, span.last + 1)}
    words = [
        (source, token.text)
        for place, token in enumerate(written.tokens)
        for source in token.sources[:1]
        if place not in inside and source.share >= LEAST
    ]
    for source, word in sorted(words, key=lambda one: -one[0].share):
        passage = f'"{_cut(source.before)}_{flat(source.token).strip()}_{_cut(source.after)}"'
        lines.append(
            _source_line(
                source.document, source.start, source.end, passage, f"{source.share:.0%} of {_cut(word, 20)!r}"
            )
        )
    for number, line in enumerate(lines[:most], 1):
        out.print(Text.assemble((f"[{number}] ", "bold"), line), soft_wrap=True)
    rate = len(written.tokens) / written.seconds if written.seconds else 0.0
    own = "no source: all of it is the model's own" if written.book < 0.005 else f"{written.book:.0%} from the book"
    drafts = f", {written.accepted} of {written.drafted} drafted tokens accepted" if written.drafted else ""
    out.print(
        f"{len(written.tokens)} tokens ({written.finish_reason}), {own}; {rate:.1f} tokens/s in {written.steps + 1} "
        f"steps{drafts}, {written.searches} searches",
        style="dim",
        soft_wrap=True,
        markup=False,
    )


def _source_line(document: str, start: int, end: int, quoted: str, share: str) -> Text:
    return Text.assemble((f"{document}, characters {start:,}-{end:,}: ", "dim"), quoted, (f"  {share}", "dim"))


def _cut(text: str, most: int = QUOTED) -> str:
    """Return a text as one line of at most `most` characters."""
    text = flat(text)
    return text if len(text) <= most else text[: most - 3] + "..."
