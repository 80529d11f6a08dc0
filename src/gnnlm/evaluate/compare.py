"""Several finished runs side by side, and whether their figures can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from gnnlm.artifact import Artifact, fingerprint
from gnnlm.evaluate.report import Report
from gnnlm.evaluate.tables import short
from gnnlm.predict.predictor import LABELS, PREDICTORS


@dataclass(frozen=True)
class Finished:
    """A finished run: its report, and what identifies its test tokens and its base model."""

    name: str
    report: Report
    test: str
    base: str

    @classmethod
    def of(cls, name: str, report: Report, corpus: Artifact, lm: Artifact | None) -> Finished:
        """From the run's artifacts; `lm` is the base model that the run itself trained, if it did."""
        files = corpus.manifest["files"]
        test = fingerprint([files[f"test.{part}.npy"]["sha256"] for part in ("tokens", "starts")])
        return cls(name, report, test, lm.fingerprint if lm is not None else str(corpus.inputs["model files"]))

    def ppl(self, row: str) -> float | None:
        """The perplexity of a row; None if it is infinite, or if there is no such row."""
        return self.report.rows[row].ppl if row in self.report.rows else None


def comparison(runs: Sequence[Finished]) -> Table:
    """The rows of several runs, one run per line; percentages only for runs with the first run's test tokens."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = [name for name in PREDICTORS if any(name in run.report.rows for run in runs)]
    for column in ("run", *(LABELS[name] for name in names), "codec", "smaller than fp32"):
        table.add_column(column, justify="left" if column in ("run", "codec") else "right", no_wrap=True)
    for run in runs:
        codec = run.report.codec
        figures = [_figure(run, runs[0], name) for name in names]
        table.add_row(run.name, *figures, f"{codec.kind}, {codec.bytes} bytes", f"{codec.compression:.0f}x")
    return table


def _figure(run: Finished, first: Finished, name: str) -> str:
    if name not in run.report.rows:
        return "-"
    ppl, was = run.ppl(name), first.ppl(name)
    if run is first or run.test != first.test or ppl is None or was is None:
        return short(ppl)
    return f"{short(ppl)} ({100 * (ppl / was - 1):+.1f}%)"


def remarks(runs: Sequence[Finished]) -> list[str]:
    """Caveats for reading the comparison, one sentence per line."""
    first, others = runs[0], runs[1:]
    lines = []
    if any(run.test == first.test for run in others):
        lines.append(f"Percentages are changes against the same row of {first.name}.")
    for run in others:
        if run.test != first.test:
            counts = f"{run.report.test_tokens:,} and {first.report.test_tokens:,} tokens"
            lines.append(
                f"{run.name} and {first.name} have different test text or tokens ({counts}): their figures cannot be "
                "compared."
            )
        if run.base != first.base:
            models = run.report.model, first.report.model
            which = f"both {models[0]}, not the same weights" if models[0] == models[1] else " and ".join(models)
            lines.append(f"{run.name} and {first.name} have different base models ({which}).")
    return lines
