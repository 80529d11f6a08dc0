"""The commands that use a finished run: score a text, show what it looks up."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from gnnlm.cli.options import out
from gnnlm.errors import CorpusError
from gnnlm.write.generate_options import OWN_PAST

if TYPE_CHECKING:
    from gnnlm.answers import Scores

STRONG = 2.0  # gain in nats that gets the full colour
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A finished run directory.")]
Predictors = Annotated[
    list[str] | None, typer.Option("--predictor", metavar="NAME", help="base, knn, gnn or gnn_knn. Default: all.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Look up only documents whose name matches this name or glob."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="NAME", help="Do not look up documents whose name matches this name or glob."),
]
Attach = Annotated[
    list[Path] | None,
    typer.Option(
        "--attach", metavar="FILE", help="Look up this text file too, as attached:NAME; it is not added to the run."
    ),
]
OwnPast = Annotated[bool, typer.Option("--own-past", help=OWN_PAST)]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per token, and a summary as the last line.")
]


def score(
    run: RunPath,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text file in UTF-8; - for standard input.")],
    predictor: Predictors = None,
    only: Only = None,
    exclude: Exclude = None,
    attach: Attach = None,
    own_past: OwnPast = False,
    as_json: JsonLines = False,
) -> None:
    """Score a text: the probability of every token under each predictor, coloured by the gain over base."""
    import gnnlm

    text = _read(file)
    scores = gnnlm.open(run).score(
        text, predictors=predictor, only=only, exclude=exclude, attach=attach, own_past=own_past
    )
    if as_json:
        for number, (token, id_, (start, end)) in enumerate(
            zip(scores.tokens, scores.ids, scores.offsets, strict=True)
        ):
            line = {"token": token, "id": id_, "start": start, "end": end}
            line["log_probs"] = {name: float(values[number]) for name, values in scores.log_probs.items()}
            line["top1"] = {name: bool(values[number]) for name, values in scores.top1.items()}
            print(json.dumps(line))
        print(json.dumps({"tokens": len(scores), "perplexity": _perplexities(scores)}))
        return
    out.print(_score_table(scores))
    best = list(scores.log_probs)[-1]
    out.print(f"probability; * the likeliest token; gain: log-probability of {best} minus that of base", soft_wrap=True)
    summary = ", ".join(f"{name} {ppl:.2f}" for name, ppl in _perplexities(scores).items())
    out.print(f"{len(scores):,} tokens; perplexity: {summary}", markup=False, soft_wrap=True)


def neighbors(
    run: RunPath,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text whose tokens are looked up.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours shown for each token.")] = 3,
    only: Only = None,
    exclude: Exclude = None,
    attach: Attach = None,
    as_json: JsonLines = False,
) -> None:
    """Show, for every token of a text, the places in the store that are looked up to predict it."""
    import gnnlm

    book = gnnlm.open(run)
    scores = book.score(text, predictors=["base"])
    found = book.neighbors(text, k, only=only, exclude=exclude, attach=attach)
    if as_json:
        for token, line in zip(scores.tokens, found, strict=True):
            print(json.dumps({"token": token, "neighbors": [asdict(neighbour) for neighbour in line]}))
        print(json.dumps({"tokens": len(found)}))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("token", "similarity", "document", "passage"):
        table.add_column(column, justify="right" if column == "similarity" else "left", overflow="fold")
    for token, line in zip(scores.tokens, found, strict=True):
        for number, n in enumerate(line):
            passage = Text.assemble(flat(n.before), (flat(n.token), "bold underline"), flat(n.after))
            table.add_row(Text(flat(token) if number == 0 else ""), f"{n.similarity:.3f}", Text(n.document), passage)
    out.print(table)


def _read(file: str) -> str:
    if file == "-":
        data = sys.stdin.buffer.read()
        name = "standard input"
    else:
        path = Path(file)
        if not path.is_file():
            raise CorpusError(f"{file}: no such file; name a text file, or - for standard input")
        data = path.read_bytes()
        name = file
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{name} is not UTF-8 (byte {error.start}); convert it first") from error


def _perplexities(scores: Scores) -> dict[str, float]:
    return {name: scores.perplexity(name) for name in scores.log_probs}


def _score_table(scores: Scores) -> Table:
    names = list(scores.log_probs)
    best = names[-1]
    gains = "base" in names and len(names) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("token")
    for name in [*names, *(["gain"] if gains else [])]:
        table.add_column(name, justify="right")
    for number, token in enumerate(scores.tokens):
        cells = [Text(_shown(scores.log_probs[name][number], bool(scores.top1[name][number]))) for name in names]
        style = ""
        if gains:
            gain = float(scores.log_probs[best][number] - scores.log_probs["base"][number])
            style = gain_style(gain)
            cells.append(Text(f"{gain:+.2f}", style))
        table.add_row(Text(flat(token), style), *cells)
    return table


def gain_style(gain: float) -> str:
    """Return green for a gain and red for a loss, brighter for larger changes.

    >>> gain_style(2.5), gain_style(-0.01)
    ('rgb(0,200,0)', '')
    """
    strength = min(1.0, abs(gain) / STRONG)
    if strength < 0.05:
        return ""
    value = round(90 + 110 * strength)
    return f"rgb(0,{value},0)" if gain > 0 else f"rgb({value},0,0)"


def _shown(log_prob: float, likeliest: bool) -> str:
    return f"{math.exp(log_prob):.4f}{'*' if likeliest else ' '}"


def flat(text: str) -> str:
    """Return a text with line breaks and tabs made visible."""
    return text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
