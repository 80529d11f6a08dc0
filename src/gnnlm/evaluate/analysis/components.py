"""Components: the run's network with one thing changed at a time, each trained with the same budget.

Which changes are made is said here; forks of the run train them (`gnnlm.run.forks`). All are compared with a baseline
fork: the run as it is, trained with that budget too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnnlm.config import Config
from gnnlm.config.presets import PRESETS
from gnnlm.errors import ConfigError, TrainingError
from gnnlm.evaluate.analysis.figure import axes_of
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, change, number, perplexity, text
from gnnlm.evaluate.compare import Finished, Shared, change_of
from gnnlm.evaluate.plots import COLOURS
from gnnlm.predict.predictor import LABELS
from gnnlm.progress import say, warn

CODE_SIZES = (16, 32, 64, 128)  # bytes of a state under product quantization, about
SMALL = 0.0005  # a change that is shown as 0
LARGE = 0.5  # a change beyond this would press the others together
CONTEXTS = (32, 64, 128, 256, 512)
GROUPS = {
    "presets": "preset",
    "window": "l = r",
    "layers": "layers",
    "inter": "inter edges",
    "updates": "neighbour updates",
    "context": "context",
    "codec": "neighbour states",
    "copying": "copying",
    "leakage": "leakage rule",
}


@dataclass(frozen=True)
class Variant:
    """One thing changed: config fields and their values, in words, and the name of the fork that has them."""

    name: str
    group: str
    words: str
    changes: Mapping[str, Any]

    def is_run(self, config: Config) -> bool:
        """Whether the run is like this already."""
        return all(resolved(config, field) == value for field, value in self.changes.items())


@dataclass(frozen=True)
class Trained:
    """A fork that has been trained and evaluated: its figures, and the seconds that training took."""

    finished: Finished
    parameters: int
    seconds: float


BASELINE = Variant("baseline", "", "as the run", {})
UNFAIR = "leakage-none"  # a demonstration, not something that one might choose


def resolved(config: Config, field: str) -> Any:
    """A field's value, or the preset's where the config leaves it open."""
    section, name = field.split(".")
    own = getattr(getattr(config, section), name)
    return own if own is not None else PRESETS[config.gnn.preset].get(section, {}).get(name)


def variants_of(config: Config, width: int) -> list[Variant]:
    """All changes, whether or not the run is like that already; `width` is the base model's."""
    found = [
        *(Variant(f"preset-{name}", "presets", name, {"gnn.preset": name}) for name in PRESETS),
        *(Variant(f"window-{n}", "window", str(n), {"gnn.left": n, "gnn.right": n}) for n in (0, 1, 2)),
        *(Variant(f"layers-{n}", "layers", str(n), {"gnn.layers": n}) for n in (1, 2, 3, 4)),
        Variant("inter-centre", "inter", "from the centre", {"gnn.inter": "centre"}),
        Variant("inter-window", "inter", "from the whole window", {"gnn.inter": "window"}),
        Variant("updates-on", "updates", "on", {"gnn.neighbour_updates": True}),
        Variant("updates-off", "updates", "off", {"gnn.neighbour_updates": False}),
        *(Variant(f"context-{n}", "context", f"{n} tokens", {"gnn.context": n}) for n in CONTEXTS),
        Variant("codec-fp16", "codec", "fp16", {"codec.kind": "fp16"}),
        *(
            Variant(f"codec-pq{size}", "codec", f"pq, {size} bytes", {"codec.kind": "pq", "codec.bytes": size})
            for size in code_sizes(width)
        ),
        Variant("copying-on", "copying", "on", _copying(config)),
        Variant("copying-off", "copying", "off", {"gnn.copying": False}),
        Variant("leakage-document", "leakage", "document", {"search.exclude": "document"}),
        Variant("leakage-field", "leakage", "receptive-field", {"search.exclude": "receptive-field"}),
        Variant(UNFAIR, "leakage", "none", {"search.exclude": "none"}),
    ]
    assert {variant.group for variant in found} == GROUPS.keys()
    return found


def _copying(config: Config) -> dict[str, Any]:
    """Copying, with what it needs; a run whose copying is on already needs nothing."""
    if resolved(config, "gnn.copying"):
        return {"gnn.copying": True}
    return {"gnn.copying": True, "gnn.token_features": True, "gnn.edge_bias": True}


def code_sizes(width: int) -> list[int]:
    """Sizes of codes to try: divisors of the width near the usual ones.

    >>> code_sizes(576), code_sizes(32)
    ([16, 32, 64, 144], [16, 32])
    """
    divisors = [size for size in range(1, width + 1) if width % size == 0]
    return sorted({min(divisors, key=lambda size: (abs(size - wanted), size)) for wanted in CODE_SIZES})


def asked_variants(variants: Sequence[Variant], named: Sequence[str]) -> list[Variant]:
    """The changes of some groups, or those named one by one; all, if none is named."""
    known = {*GROUPS, *(variant.name for variant in variants)}
    for name in named:
        if name not in known:
            names = ", ".join(variant.name for variant in variants)
            raise ConfigError(f"no component named {name!r}; expected one of {', '.join(GROUPS)}, or of {names}")
    return [variant for variant in variants if not named or variant.group in named or variant.name in named]


def measure(
    config: Config, variants: Sequence[Variant], steps: int, train: Callable[[Variant], Trained]
) -> dict[str, Any]:
    """Train (or find trained) the baseline and every change; changes of perplexity are against the baseline."""
    baseline = train(BASELINE)
    rows = [_row(BASELINE, baseline, baseline)]
    for number_, variant in enumerate(variants, 1):
        if variant.is_run(config):
            rows.append(_row(variant, baseline, baseline))
            continue
        say(f"components: {GROUPS[variant.group]} {variant.words} ({number_} of {len(variants)})")
        try:
            rows.append(_row(variant, train(variant), baseline))
        except (ConfigError, TrainingError) as error:  # a finding of its own
            warn(f"components: {variant.name}: {error}")
            rows.append(_names(variant) | {"why": str(error)})
    return {"steps": steps, "run_steps": sum(phase.steps for phase in config.train.curriculum), "rows": rows}


def _names(variant: Variant) -> dict[str, Any]:
    return {"name": variant.name, "group": variant.group, "words": variant.words}


def _row(variant: Variant, made: Trained, baseline: Trained) -> dict[str, Any]:
    shared = Shared.between(made.finished, baseline.finished)
    row = _names(variant) | {"is_run": made is baseline, "parameters": made.parameters, "seconds": made.seconds}
    for name in ("gnn", "gnn_knn"):
        found = None if made is baseline else change_of(made.finished, baseline.finished, name, shared)
        low, high = (found.interval if found is not None else None) or (None, None)
        row[name] = {
            "ppl": made.finished.ppl(name),
            "change": None if found is None else found.change,
            "change_low": low,
            "change_high": high,
        }
    return row


def show(found: dict[str, Any]) -> Section:
    baseline, *others = found["rows"]
    made = [row for row in others if "why" not in row]
    columns = [
        text("component"),
        text("value"),
        perplexity("+GNN"),
        text("+GNN: change against the baseline, 95%"),
        perplexity("+GNN+kNN"),
        text("+GNN+kNN: change against the baseline, 95%"),
        number("parameters", 0),
        number("training (s)", 0),
    ]
    said = [
        f"Each row is the run with one thing changed, trained for {found['steps']:,} steps (the run itself: "
        f"{found['run_steps']:,}) and tuned on valid. Changes are against the baseline, the run as it is with the same "
        "budget, on the test documents that both have; a smaller budget than the run's favours what learns fast.",
        *_findings(made),
        *(f"{_name(row)} could not be trained: {row['why']}" for row in others if "why" in row),
    ]
    tables = [Table("components", "One component changed at a time", columns, [_cells(row) for row in found["rows"]])]
    figures = [_figure(baseline, made)] if any(not row["is_run"] for row in made) else []
    return Section("components", "Components", said, tables, figures, _findings(made)[:1])


def _findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    known = [row for row in rows if row["gnn"]["change"] is not None]
    if not known:
        return []
    fair = [row for row in known if row["name"] != UNFAIR]
    sure = [row for row in fair if _is_sure(row["gnn"])]
    said = [f"{_name(row)} {words} of {len(fair)} changes: {_change(row['gnn'])} in perplexity of +GNN."
            for row, words in _ends(sure)]  # fmt: skip
    if len(sure) < len(fair):
        said.append(f"{len(fair) - len(sure)} of {len(fair)} changes are not significant.")
    said += [
        "Without the leakage rule a train position retrieves itself and with it its own answer, and the network "
        f"learns to copy what new text does not have: {_change(row['gnn'])} in perplexity of +GNN on test."
        for row in known
        if row["name"] == UNFAIR
    ]
    return said


def _ends(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The change that helps most and the one that hurts most, if they do."""
    if not rows:
        return []
    best, worst = (pick(rows, key=lambda row: row["gnn"]["change"]) for pick in (min, max))
    ends = [(best, "helps most")] if best["gnn"]["change"] < -SMALL else []
    return ends + ([(worst, "hurts most")] if worst["gnn"]["change"] > SMALL else [])


def _is_sure(row: dict[str, Any]) -> bool:
    return row["change_low"] is not None and not row["change_low"] <= 0 <= row["change_high"]


def _change(row: dict[str, Any]) -> str:
    return change(row["change"], row["change_low"], row["change_high"])


def _name(row: dict[str, Any]) -> str:
    words = f"{GROUPS[row['group']]} {row['words']}"
    return words[0].upper() + words[1:]


def _cells(row: dict[str, Any]) -> list[Cell]:
    first: list[Cell] = [GROUPS.get(row["group"], "baseline"), row["words"]]
    if "why" in row:
        return [*first, None, "could not be trained", None, "", None, None]
    figures: list[Cell] = []
    for name in ("gnn", "gnn_knn"):
        ppl = row[name]["ppl"]
        figures += ["inf" if ppl is None else ppl, _words(row, name)]
    return [*first, *figures, row["parameters"], row["seconds"]]


def _words(row: dict[str, Any], name: str) -> str:
    if row["is_run"]:
        return "the baseline" if row["group"] else ""
    return _change(row[name])


def _figure(baseline: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Figure:
    shown = [row for row in rows if not row["is_run"] and row["gnn"]["change"] is not None]
    figure, (axes,) = axes_of(1, height=1.2 + 0.26 * len(shown), width=7.0)
    for place, row in enumerate(shown):
        for name, mark, shift in (("gnn", "D", -0.15), ("gnn_knn", "^", 0.15)):
            found = row[name]
            if found["change"] is None:
                continue
            ends = [found[end] if found[end] is not None else found["change"] for end in ("change_low", "change_high")]
            axes.plot([100 * end for end in ends], [place + shift] * 2, color=COLOURS[name], lw=1.5)
            label = LABELS[name] if place == 0 else None
            axes.plot(100 * found["change"], place + shift, mark, color=COLOURS[name], ms=5, mec="white", label=label)
    axes.axvline(0, color=COLOURS["base"], ls="--", lw=1)
    axes.set_yticks(range(len(shown)), [_name(row) for row in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    if max(abs(row[name]["change"] or 0.0) for row in shown for name in ("gnn", "gnn_knn")) > LARGE:
        axes.set_xscale("symlog", linthresh=100 * LARGE)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("change of test perplexity against the baseline in %, with 95% interval")
    axes.legend(frameon=False, fontsize=9, loc="best")
    words = "; ".join(f"{_name(row)} {_change(row['gnn'])}" for row in shown)
    return Figure(
        "components", "What each change does to perplexity", f"Change of +GNN against the baseline: {words}.", figure
    )
