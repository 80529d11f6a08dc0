"""The report in readable form: a table for the terminal, Markdown, and the notes below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gnnlm.evaluate.change import short
from gnnlm.evaluate.report import EARLY, FEW_DOCUMENTS, PassageComparison, PassageRow, Report, Row
from gnnlm.evaluate.table import Cell, Table, number, percent, perplexity, text
from gnnlm.predict.predictor import LABELS

PASSAGE_LABELS = {
    **LABELS,
    **{f"passages_{name}": f"passages {label}" for name, label in LABELS.items()},
    "passages": "passages",
}


def report_table(report: Report) -> Table:
    """The rows of the report; base has no change."""

    def of_change(value: Callable[[Row], Cell]) -> Callable[[tuple[str, Row]], Cell]:
        return lambda line: "" if line[0] == "base" else value(line[1])

    return Table.of(
        "rows",
        "The rows of the report",
        [(name, report.rows[name]) for name in report.predictors],
        text("model", lambda line: LABELS[line[0]]),
        perplexity("ppl", lambda line: _or_inf(line[1].ppl)),
        text("95%", lambda line: _range(line[1].ppl_95)),
        text("change, 95%", of_change(lambda row: row.change_words)),
        perplexity("ppl/word", lambda line: _or_inf(line[1].ppl_word)),
        number("bits/byte", lambda line: _or_inf(line[1].bits_per_byte), 3),
        percent("helped", of_change(lambda row: row.helped), 0),
        percent("hurt", of_change(lambda row: row.hurt), 0),
        number("tok/s", lambda line: line[1].tokens_per_second, 0),
    )


def passage_table(found: PassageComparison) -> Table:
    """The rows of the comparison with passages."""

    def later(line: tuple[str, PassageRow]) -> Cell:
        return _or_inf(line[1].ppl_later) if found.later_tokens else "-"

    def later_change(line: tuple[str, PassageRow]) -> Cell:
        name, row = line
        if not found.later_tokens:
            return "-"
        if name == "base":
            return ""
        return "inf" if row.change_later is None or row.ppl_later is None else row.change_later

    return Table.of(
        "passages",
        passage_headline(found),
        found.rows.items(),
        text("model", lambda line: PASSAGE_LABELS[line[0]]),
        perplexity("ppl", lambda line: _or_inf(line[1].ppl)),
        text("95%", lambda line: _range(line[1].ppl_95)),
        text("change, 95%", lambda line: "" if line[0] == "base" else line[1].change_words),
        perplexity(f"ppl after {found.later}", later),
        percent("change", later_change, 1, sign=True),
        number("tok/s", lambda line: line[1].tokens_per_second, 1),
    )


def _or_inf(value: float | None) -> Cell:
    return "inf" if value is None else value


def _range(ends: tuple[float | None, float | None]) -> str:
    return f"{short(ends[0])}-{short(ends[1])}"


def markdown(report: Report) -> str:
    lines = [f"# {headline(report)}", "", *report_table(report).markdown(), "", *notes(report), ""]
    if (found := report.passages) is not None:
        lines += [f"## {passage_headline(found)}", "", *passage_table(found).markdown(), ""]
        lines += [*passage_notes(found), ""]
    return "\n".join(lines)


def headline(report: Report) -> str:
    return (
        f"{report.test_tokens:,} test tokens of {report.test_documents} documents, "
        f"{report.store_tokens:,} store tokens, {report.model}"
    )


def passage_headline(found: PassageComparison) -> str:
    return f"With passages before the text: the first {found.tokens:,} test tokens, of {found.documents} documents"


def passage_notes(found: PassageComparison) -> list[str]:
    """The notes below the comparison with passages, one per line."""
    several = "the best passage" if found.count == 1 else f"the {found.count} best passages"
    tried = "; ".join(f"{t.count} x {t.length} every {t.stride} by {t.query}: {short(t.ppl)}" for t in found.tried)
    lines = [
        f"passages: {several} of {found.length} tokens by BM25, of {found.passages:,} in the store, looked up every "
        f"{found.stride} tokens with the last {found.query}, and read by the frozen base model before the text: "
        f"it reads {found.tokens_read:.1f} tokens for each token of the text.",
        f"Chosen on {found.valid_tokens:,} tokens of valid, where the base model has perplexity "
        f"{short(found.valid_base_ppl)} and with passages ({tried}).",
    ]
    own = [(name, row.ppl_own_mix) for name, row in found.rows.items() if row.ppl_own_mix is not None]
    if own:
        rows = ", ".join(f"{PASSAGE_LABELS[name]} {short(ppl)}" for name, ppl in own)
        lines.append(
            "The rows with passages have the kNN mixes of those without; with mixes chosen for them on these tokens of "
            f"valid: {rows}."
        )
    return lines


def notes(report: Report) -> list[str]:
    """The notes below the table, one per line."""
    mixes = "; ".join(
        f"k = {mix['k']}, T = {mix['temperature']:g}, lambda {_weight(mix)} for {'GNN' if name == 'gnn' else name}"
        for name, mix in report.mix.items()
    )
    return [
        *_few(report),
        *_cut(report),
        "change: of perplexity against base, with its 95% interval by paired bootstrap over test documents. A change "
        "is significant if its interval leaves out 0, also where the intervals of the perplexities overlap.",
        *_beginnings(report),
        f"kNN: {mixes}; chosen on valid.",
        *_weights(report),
        "helped and hurt: the share of tokens whose probability rose or fell. Mixing kNN in lowers most of them a "
        "little and raises some a lot, so perplexity can fall where most tokens are hurt.",
        *_overlap(report.overlap, report.overlap_ngram),
        *_base_model(report),
        *_index(report),
        *_network(report),
        "tok/s counts encoding, search and prediction, each as measured in this run.",
    ]


def _weights(report: Report) -> list[str]:
    """How the ways to weigh kNN compare, a line for each predictor that has it."""
    lines = []
    for name, rows in report.weights.items():
        found = "; ".join(
            f"{variant}{', chosen:' if row.chosen else ':'} {short(row.valid_ppl)} on valid, {short(row.ppl)} on test "
            f"({100 * row.helped:.0f}% helped, +{_nats(row.gained)}; {100 * row.hurt:.0f}% hurt, -{_nats(row.lost)})"
            for variant, row in rows.items()
        )
        lines.append(f"Weight of kNN in {LABELS[name]}: {found}.")
    if lines:
        lines.append(
            "On valid by cross-validation. In brackets, against the row without kNN: the share of test tokens helped "
            "and hurt, and what they add to the mean log-probability, in nats."
        )
    return lines


def _nats(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3f}"


def _few(report: Report) -> list[str]:
    few = [f"{split} has {count}" for split, count in report.split_documents.items() if count < FEW_DOCUMENTS]
    if not few:
        return []
    return [
        f"Warning: fewer than {FEW_DOCUMENTS} documents in a split ({', '.join(few)}): intervals are too narrow, and "
        "other text may give other figures."
    ]


def _cut(report: Report) -> list[str]:
    """Which splits hold only the beginnings of documents."""
    return [
        f"Documents of {split} were cut to their first {length:,} tokens, so that {report.split_documents[split]} of "
        "them fit into its limit (corpus.min_documents). Beginnings are where retrieval helps most."
        for split, length in report.cut_to.items()
    ]


def _beginnings(report: Report) -> list[str]:
    """How much of the gain is made at the beginning of documents, where the base model has read little."""
    last = report.predictors[-1]
    early_gain, late_gain = report.rows[last].early_gain, report.rows[last].late_gain
    early = report.early_tokens
    if early == report.test_tokens or early_gain is None or late_gain is None or early_gain + late_gain <= 0:
        return []
    both = ((LABELS[name], report.rows[name]) for name in report.predictors)
    return [
        f"Beginnings: {100 * early_gain / (early_gain + late_gain):.0f}% of the gain of {LABELS[last]} (in nats) is "
        f"made in the first {EARLY} tokens of documents, which are {100 * early / report.test_tokens:.0f}% of the "
        "tokens. Perplexity there and after: "
        + ", ".join(f"{label} {short(row.ppl_early)} and {short(row.ppl_late)}" for label, row in both)
        + "."
    ]


def _weight(mix: dict[str, Any]) -> str:
    if mix.get("gate"):
        return "by a gate"
    each = mix.get("weights")
    return f"= {min(each):g} to {max(each):g} by similarity" if each else f"= {mix['weight']:g}"


def _overlap(found: dict[str, Any], n: int) -> list[str]:
    test, train = found["test"], found["train"]
    if test is None:
        return ["Overlap: the splits were used as given; text that appears in more than one was not looked for."]
    done = "They were removed from test." if test["repeats_were"] == "dropped" else "They were kept in test."
    return [
        f"Overlap: {test['repeated_paragraphs']} of {test['paragraphs']} test paragraphs ({test['repeated_words']} of "
        f"{test['words']} words) also appear in train or valid. {done}",
        f"In the test text that remains, {100 * test['remaining_ngram_overlap']:.1f}% of the {n}-word sequences occur "
        f"in train or valid, and {100 * test.get('remaining_short_overlap', 0):.1f}% of the words are in headings and "
        f"lines shorter than {n} words that occur there.",
        f"Within train, {train['repeated_paragraphs']} of {train['paragraphs']} paragraphs repeat another document; "
        + ("they were removed." if train["repeats_were"] == "dropped" else "they were kept."),
    ]


def _base_model(report: Report) -> list[str]:
    """How the base model was trained, if it was trained in the run."""
    lm = report.lm
    if lm.kind == "frozen":
        return []
    how = "trained on train" if lm.kind == "scratch" else f"fine-tuned on train ({lm.kind})"
    unread = f", {len(lm.unread)} documents held out from it for the GNN to learn on" if lm.unread else ""
    if lm.first_reading:
        unread = f"; the GNN learned on its states of {lm.first_reading['count']:,} tokens at first reading"
    return [f"Base model: {how}, step {lm.best_step} of {lm.steps_done}, {lm.seconds / 60:.0f} minutes{unread}."]


def _index(report: Report) -> list[str]:
    """What an approximate index finds of the true neighbours; nothing for exact search."""
    if report.index is None or not report.index.recall:
        return []
    index = report.index
    recall = ", ".join(f"{100 * value:.1f}% of {int(k):,}" for k, value in index.recall.items())
    return [
        f"Index: {index.kind} over {index.rows:,} rows, {index.probes} clusters searched. It finds {recall} nearest, "
        f"measured on {index.recall_queries} valid positions when it was built."
    ]


def _network(report: Report) -> list[str]:
    """How the network was trained, and how neighbour states are stored and read."""
    if report.training is None or report.cache is None:
        return ["No graph network: gnn.layers is 0."]
    codec, cache = report.codec, report.cache
    how = f"{codec.kind}, {codec.bytes} bytes each"
    if codec.error is not None:
        how += f" ({codec.compression:.0f}x smaller than fp32, {100 * codec.error:.1f}% of their variance lost)"
    read = "computed for each batch" if cache.form == "none" else f"read from a cache ({cache.form}, {cache.dtype})"
    return [
        f"GNN: step {report.training.best_step} of {report.training.steps_done}, "
        f"{report.training.parameters:,} parameters.",
        f"Neighbour states: {how}; {read}.",
    ]
