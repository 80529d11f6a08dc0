"""The report: four rows, with what makes each figure trustworthy beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from gnnlm.predict.predictor import LABELS, PREDICTORS, perplexity

SAME = 1e-6  # log-probabilities closer than this count as unchanged
Floats = npt.NDArray[np.float64]


def row(
    scores: Floats, base: Floats, document: npt.NDArray[np.int64], counts: dict[str, int], samples: int, seed: int
) -> dict[str, Any]:
    """The figures of one predictor. `document` numbers the document of each token."""
    total = -float(scores.sum())
    gain = scores - base
    return {
        "ppl": perplexity(total / len(scores)),
        "ppl_95": list(bootstrap_interval(scores, document, samples, seed)),
        "ppl_word": perplexity(total / counts["words"]),
        "bits_per_byte": total / math.log(2) / counts["bytes"],
        "helped": float((gain > SAME).mean()),
        "hurt": float((gain < -SAME).mean()),
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity: such a figure is null."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None


def bootstrap_interval(scores: Floats, document: npt.NDArray[np.int64], samples: int, seed: int) -> tuple[float, float]:
    """95% interval of perplexity when whole documents are drawn anew."""
    count = int(document.max()) + 1
    sums = np.bincount(document, weights=-scores, minlength=count)
    sizes = np.bincount(document, minlength=count)
    drawn = np.random.default_rng(seed).integers(count, size=(samples, count))
    drawn_sizes = np.maximum(sizes[drawn].sum(1), 1)
    means = np.sort(sums[drawn].sum(1) / drawn_sizes)  # sorted, not interpolated: a mean may be infinite
    low, high = means[int(0.025 * (samples - 1))], means[round(0.975 * (samples - 1))]
    return perplexity(low), perplexity(high)


def make_report(
    scores: dict[str, Floats],
    document: npt.NDArray[np.int64],
    counts: dict[str, int],
    speeds: dict[str, float],
    samples: int,
    seed: int,
    **facts: Any,
) -> dict[str, Any]:
    """Everything the table, the JSON and the figures show."""
    base = scores["base"]
    rows = {}
    for name in PREDICTORS:
        rows[name] = row(scores[name], base, document, counts, samples, seed)
        rows[name]["tokens_per_second"] = speeds[name]
        rows[name]["change"] = rows[name]["ppl"] / rows["base"]["ppl"] - 1
        rows[name] = {key: _plain(value) for key, value in rows[name].items()}
    return {"rows": rows, "test_tokens": len(base), "test_documents": int(document.max()) + 1, **facts}


COLUMNS = ("model", "ppl", "95%", "change", "ppl/word", "bits/byte", "helped", "hurt", "tok/s")


def cells(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table's text, row by row."""
    lines: list[tuple[str, ...]] = []
    for name in PREDICTORS:
        r = report["rows"][name]
        low, high = r["ppl_95"]
        first = name == "base"
        lines.append(
            (
                LABELS[name],
                short(r["ppl"]),
                f"{short(low)}-{short(high)}",
                "" if first else "inf" if r["change"] is None else f"{100 * r['change']:+.1f}%",
                short(r["ppl_word"]),
                "inf" if r["bits_per_byte"] is None else f"{r['bits_per_byte']:.3f}",
                "" if first else f"{100 * r['helped']:.0f}%",
                "" if first else f"{100 * r['hurt']:.0f}%",
                f"{r['tokens_per_second']:,.0f}",
            )
        )
    return lines


def short(value: float | None) -> str:
    """
    >>> short(8.174), short(102.34), short(1149776.2)
    ('8.17', '102.3', '1.15e+06')
    """
    if value is None:
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1e4 else f"{value:.3g}"


def rich_table(report: dict[str, Any]) -> Table:
    table = Table(title=headline(report), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for line in cells(report):
        table.add_row(*line)
    return table


def markdown(report: dict[str, Any]) -> str:
    lines = [f"# {headline(report)}", "", "| " + " | ".join(COLUMNS) + " |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(line) + " |" for line in cells(report)]
    return "\n".join([*lines, "", *notes(report), ""])


def headline(report: dict[str, Any]) -> str:
    return (
        f"{report['test_tokens']:,} test tokens of {report['test_documents']} documents, "
        f"{report['store_tokens']:,} store tokens, {report['model']}"
    )


def comparison(reports: dict[str, dict[str, Any]]) -> Table:
    """The four rows of several runs, a run a line, with what its neighbour nodes cost; changes are to the first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("run", *(LABELS[name] for name in PREDICTORS), "codec", "smaller than fp32"):
        table.add_column(column, justify="left" if column in ("run", "codec") else "right", no_wrap=True)
    first = next(iter(reports.values()))
    for run, report in reports.items():
        figures = []
        for name in PREDICTORS:
            ppl, was = report["rows"][name]["ppl"], first["rows"][name]["ppl"]
            change = "" if report is first or not ppl or not was else f" ({100 * (ppl / was - 1):+.1f}%)"
            figures.append(short(ppl) + change)
        codec = report["codec"]
        table.add_row(run, *figures, f"{codec['kind']}, {codec['bytes']} bytes", f"{codec['compression']:.0f}x")
    return table


def _states(report: dict[str, Any]) -> str:
    """How neighbour states were kept, and read when predicting."""
    codec, cache = report["codec"], report["cache"]
    how = f"{codec['kind']}, {codec['bytes']} bytes each"
    if codec["kind"] == "pq":
        how += f" ({codec['compression']:.0f}x smaller than fp32, {100 * codec['error']:.1f}% of their variance lost)"
    read = (
        "computed for each batch"
        if cache["form"] == "none"
        else f"read from a cache ({cache['form']}, {cache['dtype']})"
    )
    return f"Neighbour states: {how}; {read}."


def _overlap(found: dict[str, Any], n: int) -> list[str]:
    test, train = found["test"], found["train"]
    if test is None:
        return ["Overlap: the splits were taken as they came; text that stands in more than one was not looked for."]
    return [
        f"Overlap: of the documents read, {test['repeated_paragraphs']} of {test['paragraphs']} test paragraphs "
        f"({test['repeated_words']} of {test['words']} words) stand in train or valid and were {test['repeats_were']}; "
        f"{100 * test['remaining_ngram_overlap']:.1f}% of the {n}-grams left still occur there, and "
        f"{100 * test.get('remaining_short_overlap', 0):.1f}% of the words left are headings and lines of fewer "
        f"than {n} words that do.",
        f"Inside train {train['repeated_paragraphs']} of {train['paragraphs']} paragraphs repeat another document and "
        f"were {train['repeats_were']}.",
    ]


def _base_model(lm: dict[str, Any]) -> list[str]:
    """How the base model was made, where it was made in the run."""
    if lm["kind"] == "frozen":
        return []
    how = "trained on train" if lm["kind"] == "scratch" else f"fine-tuned on train ({lm['kind']})"
    unread = f", {len(lm['unread'])} documents kept from it for the GNN to learn on" if lm.get("unread") else ""
    if lm.get("first_reading"):
        unread = f"; the GNN learned on its states of {lm['first_reading']['count']:,} tokens at first reading"
    return [
        f"Base model: {how}, step {lm['best_step']} of {lm['steps_done']}, {lm['seconds'] / 60:.0f} minutes{unread}."
    ]


def _weight(mix: dict[str, Any]) -> str:
    each = mix.get("weights")
    return f"{min(each):g} to {max(each):g} by similarity" if each else f"{mix['weight']:g}"


def notes(report: dict[str, Any]) -> list[str]:
    """What stands below the table, a sentence a line."""
    base, gnn = report["mix"]["base"], report["mix"]["gnn"]
    return [
        f"kNN: k = {base['k']}, T = {base['temperature']:g}, lambda = {_weight(base)} for base; "
        f"k = {gnn['k']}, T = {gnn['temperature']:g}, lambda = {_weight(gnn)} for GNN; chosen on valid.",
        *_overlap(report["overlap"], report["overlap_ngram"]),
        *_base_model(report.get("lm", {"kind": "frozen"})),
        f"GNN: step {report['training']['best_step']} of {report['training']['steps_done']}, "
        f"{report['training']['parameters']:,} parameters.",
        _states(report),
        "tok/s counts encoding, search and prediction, each as measured in this run.",
    ]
