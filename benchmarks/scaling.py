"""What 100M, 768M and 10B tokens take, computed by the plan from rates measured here; search over nodes, simulated.

    python benchmarks/scaling.py --write     # the tables of docs/scaling.md and of benchmarks/results.md, anew

Measured on one machine, in about 20 seconds, on made-up keys and text: what a token costs to read, what a
row costs to compare, what a neighbour costs to find, what merging the results of nodes costs. The rest is arithmetic.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import machine

from gnnlm.artifact import human_bytes
from gnnlm.config import Config, load_config
from gnnlm.plan.needs import Need, PlanFacts, plan
from gnnlm.plan.rates import Rates, bf16_slowdown, slow_settings
from gnnlm.plan.sizes import ModelSizes, TextSize
from gnnlm.progress import human_time
from gnnlm.retrieval import search_costs
from gnnlm.retrieval.search_costs import index_shape, timed
from gnnlm.run import Run
from gnnlm.run.planning import model_sizes, rates_here

ROOT = Path(__file__).parent.parent
SIZES = {"100M": 100_000_000, "768M": 768_000_000, "10B": 10_000_000_000}
PAPERS = {"100M": (4096, 128), "768M": (2**20, 64), "10B": (2**20, 64)}  # clusters, and bytes of a key
NODES = (1, 4, 16, 64)
NETWORK = 1.25e9  # bytes a second between nodes: 10 Gbit/s
HELD = TextSize(231_000, 60)  # valid and test, each, as in WikiText-103
STAGES = ("encode", "codec", "index", "search", "train", "tune", "eval")


def sized(config: Config, size: str) -> Config:
    """The config with the paper's index for so many rows."""
    clusters, code = PAPERS[size]
    return config.model_copy(update={"index": config.index.model_copy(update={"clusters": clusters, "bytes": code})})


def planned(config: Config, about: ModelSizes, rates: Rates, size: str) -> dict[str, Need]:
    text = {"train": TextSize(SIZES[size], 0), "valid": HELD, "test": HELD}
    return plan(sized(config, size), PlanFacts(about, text, rates))


def plan_table(config: Config, about: ModelSizes, rates: Rates) -> list[str]:
    needs = {size: planned(config, about, rates, size) for size in SIZES}
    lines = ["| stage | " + " | ".join(f"{size}: disk | memory | time" for size in SIZES) + " |"]
    lines.append("|---|" + "--:|--:|--:|" * len(SIZES))
    stages = [stage for stage in STAGES if stage in needs[next(iter(SIZES))]]  # no codec where states stay as they are
    for stage in stages:
        cells = [
            f"{human_bytes(need.disk)} | {human_bytes(need.memory)} | {human_time(need.seconds)}"
            for need in (needs[size][stage] for size in SIZES)
        ]
        lines.append(f"| {stage} | " + " | ".join(cells) + " |")
    totals = [
        f"{human_bytes(sum(need[s].disk for s in stages))} | {human_bytes(max(need[s].memory for s in stages))} | "
        f"{human_time(sum(need[s].seconds for s in stages))}"
        for need in needs.values()
    ]
    return [*lines, "| together | " + " | ".join(totals) + " |"]


@dataclass(frozen=True)
class Simulated:
    """Search of all positions of a store that is spread over nodes."""

    size: str
    nodes: int
    seconds: float  # of all queries
    queries_per_second: float
    merging: float  # the share of the time that goes into sending and merging
    index_bytes: float  # of the index, on each node

    @property
    def row(self) -> str:
        return (
            f"| {self.size} | {self.nodes} | {human_bytes(self.index_bytes)} | {self.queries_per_second:,.0f} | "
            f"{human_time(self.seconds)} | {self.merging:.0%} |"
        )


def merge_seconds(nodes: int, k: int) -> float:
    """Seconds of one query's exact merge of the k best of each node, measured."""
    if nodes == 1:
        return 0.0
    scores_QC = torch.rand(64, nodes * k)
    return timed(lambda: torch.topk(scores_QC, k)) / 64


def simulate(config: Config, width: int, rates: Rates, merging: dict[int, float], size: str, nodes: int) -> Simulated:
    """Every query goes to every node, which holds a share of the rows; clusters are found once, on any node.

    Merges are spread over the nodes, as the queries are.
    """
    rows, queries, k = SIZES[size], SIZES[size] + 2 * HELD.tokens, config.search.k
    shape = index_shape(sized(config, size).index, rows, width)
    assert shape is not None
    scanning = (
        shape.clusters_compared * rates.compare / nodes
        + shape.rows_scanned(rows) / nodes * rates.scan
        + k * rates.neighbour
    )
    joining = merging[nodes] / nodes + ((nodes - 1) * k * 8 / NETWORK / nodes if nodes > 1 else 0.0)
    seconds = queries * (scanning + joining)
    index = rows / nodes * shape.row_bytes + shape.centroid_bytes
    return Simulated(size, nodes, seconds, queries / seconds, joining / (scanning + joining), index)


def search_table(found: list[Simulated]) -> list[str]:
    lines = [
        "| rows | nodes | index on each | queries/s | all positions | sending and merging |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    return [*lines, *(one.row for one in found)]


def replace_between(path: Path, name: str, lines: list[str]) -> None:
    """Replace what stands between the markers of a table."""
    text = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    assert begin in text, f"{path}: no marker {begin}"
    body = "\n".join([begin, *lines, end])
    path.write_text(
        re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: body, text, flags=re.S), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables of docs/scaling.md, from rates measured here.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "wikitext103.yaml")
    parser.add_argument(
        "--cores", type=int, default=64, help="cores of a node, as fast as these (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/scaling.md and results.md")
    parser.add_argument("--note", default="", help="a remark about the measurement, written under the tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the processor's time, with one thread: for a machine that is busy with other work",
    )
    given = parser.parse_args()
    if given.cpu_time:
        torch.set_num_threads(1)
        search_costs.clock = time.process_time
    cores = torch.get_num_threads()
    slowdown = bf16_slowdown("auto")
    slow = slow_settings(load_config(given.config), slowdown, ("encode", "train"))  # without instructions for bfloat16
    run = Run(load_config(given.config, [words.rpartition(" ")[2] for words in slow]))
    about = model_sizes(run)
    here = rates_here(run, about, learning=False, slowdown=slowdown)
    rates = here.on(given.cores / cores)
    merging = {nodes: merge_seconds(nodes, run.config.search.k) * cores / given.cores for nodes in NODES}
    stages = plan_table(run.config, about, rates)
    simulated = [simulate(run.config, about.width, rates, merging, size, n) for size in SIZES for n in NODES]
    note = " ".join([*(f"Planned with `{words.rpartition(' ')[2]}`." for words in slow), given.note])
    measured = [
        f"Measured on {machine()}; scaled from {cores} core{'s' * (cores > 1)} to {given.cores}. {note}".rstrip(),
        "",
        "| unit | seconds, one machine as measured |",
        "|---|--:|",
        f"| a token read by the base model | {here.read:.2e} |",
        f"| a key compared with another | {here.compare:.2e} |",
        f"| a row of a cluster scanned | {here.scan:.2e} |",
        f"| a neighbour found | {here.neighbour:.2e} |",
        *(f"| a token trained on at k = {k} | {seconds:.2e} |" for k, seconds in here.train.items()),
        *(f"| one merge over {n} nodes | {merging[n] * given.cores / cores:.2e} |" for n in NODES if n > 1),
    ]
    tables = {"plan": stages, "search": search_table(simulated), "rates": measured}
    for lines in tables.values():
        print("\n".join(lines), end="\n\n")
    if given.write:
        for name in ("plan", "rates"):
            replace_between(ROOT / "docs" / "scaling.md", name, tables[name])
        replace_between(ROOT / "benchmarks" / "results.md", "search over nodes", [*tables["search"], "", measured[0]])
    if given.json:
        print(json.dumps({"rates": here.as_dict(), "cores": given.cores, "search": [asdict(one) for one in simulated]}))


if __name__ == "__main__":
    main()
