"""Search of real LM states at k = 1024: what each index takes to build, how fast it is, what it finds, what it holds.

    python benchmarks/search.py --run runs/demo runs/wikitext2 --rows 300000 3000000 --work /tmp/search --json

The rows are the train states of the runs (or .npy files of states), the queries states of their valid text. Where more
rows are asked for than there are, they are inflated (`inflated` says how). Each index is built in one process and
searched in another, so that its memory is its own: what the searching process holds beyond the imports, maps of files
left out. Recall is measured against exact search. `paper, scanned by FAISS` is the paper's index as FAISS searches it,
`paper` the same index searched list by list, `auto` what index.kind: auto chooses, `auto, paper's memory` what it
chooses when it may hold as much as the process with the paper's index does (its codes, and tables of distances that
FAISS computes beforehand), and `auto, paper's bytes` when a row may take no more than its code there.

With --work, everything that was made stays in that directory: the rows, an index of each kind, the figures of each
case. So the table can be made in pieces (`--rows`, `--index`), an interrupted one goes on, and --all shows what all
the pieces gave. Delete a case's .json file to measure it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from common import in_a_process, one_by_one, open_run, report

from gnnlm.config import IndexConfig
from gnnlm.datastore.store import read_rows
from gnnlm.errors import ConfigError
from gnnlm.retrieval.auto_index import BESIDE_A_CODE, resolved
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.faiss_build import fill_index, train_index
from gnnlm.retrieval.faiss_index import open_faiss_index
from gnnlm.retrieval.index import Index, Rows, keys_of
from gnnlm.retrieval.index_recall import nearest, recall_from

SCANNED = ", scanned by FAISS"  # beside a case: not list by list, but as FAISS searches
PAPER = f"paper{SCANNED}"
IN_MEMORY, IN_BYTES = "auto, paper's memory", "auto, paper's bytes"
CASES = ("exact", PAPER, "paper", "auto", IN_MEMORY, IN_BYTES, "ivf", "fast-scan", "PQ", "RaBitQ")
CHECKED = 128  # queries whose recall is measured
NEAR, BLOCK = 8, 16_384  # near rows to mix with, looked for among so many
SEED = 0


def real_states(runs: list[str], files: list[str]) -> tuple[Any, Any]:
    """Rows and queries: train and valid states of runs; of a file, every 50th row is a query."""
    rows, queries = [], []
    for name in runs:
        run = open_run(name)
        encoded, streams = run.artifact("encode"), run.snapshot.streams
        for split, kept in (("train", rows), ("valid", queries)):
            kept.append(read_rows(keys_of(encoded, split), Rows.of(streams[split]).all()).half().numpy())
    for name in files:
        states = np.load(name, mmap_mode="r")
        held = np.arange(len(states)) % 50 == 49
        rows.append(np.asarray(states[~held], np.float16))
        queries.append(np.asarray(states[held], np.float16))
    if not rows:
        raise ConfigError("no states: name runs (--run) or .npy files (--states)")
    return np.concatenate(rows), np.concatenate(queries)


def inflated(states: Any, rows: int, path: Path) -> None:
    """Write `rows` rows: the real ones, shuffled, and then mixtures of near ones, all different.

    A new row is (1 - t) a + t b, where b is one of the 8 rows nearest to a among 16,384, and t is drawn from
    0.25..0.75. Mixing draws rows together: it takes t (1 - t) |a - b|^2 from the mean squared distance. As much is
    added again in the direction in which two other near rows differ. So new rows lie where rows are, differ in the
    ways in which near rows differ, and near rows are about as far apart as those of more text of the same kind would
    be. What does not grow with it is the number of kinds of contexts: real text would bring new ones. Every row is
    the first, a, of about as many mixtures. The first rows of a larger store are those of a smaller one.
    """
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(states))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(rows, states.shape[1]))
    done = min(rows, len(states))
    out[:done] = states[order[:done]]
    blocks = [order[first :: max(1, len(order) // BLOCK)] for first in range(max(1, len(order) // BLOCK))]
    near = [near_rows(states[block]) for block in blocks] if done < rows else []
    while done < rows:
        for block, around in zip(blocks, near, strict=True):
            mixed = mixtures(torch.from_numpy(states[block]).float(), around, rng)[: rows - done]
            out[done : done + len(mixed)] = mixed.half()
            done += len(mixed)
    out.flush()


def near_rows(states: Any) -> Any:
    """The numbers of the rows nearest to each."""
    unit = torch.nn.functional.normalize(torch.from_numpy(states).float(), dim=1)
    return torch.cat([(part @ unit.T).topk(NEAR + 1).indices[:, 1:] for part in unit.split(512)]).numpy()


def mixtures(some: torch.Tensor, near: Any, rng: np.random.Generator) -> torch.Tensor:
    """A mixture for each row, of it and its near rows."""
    count = len(some)
    own = np.arange(count)
    other = near[own, rng.integers(NEAR, size=count)]
    third = near[other, rng.integers(NEAR, size=count)]
    fourth = near[third, rng.integers(NEAR, size=count)]
    a, b, c, d = (some[torch.from_numpy(at)] for at in (own, other, third, fourth))
    t = torch.from_numpy(rng.uniform(0.25, 0.75, size=(count, 1))).float()
    lost = (a - b).norm(dim=1, keepdim=True) * (t * (1 - t)).sqrt()
    return (1 - t) * a + t * b + lost * torch.nn.functional.normalize(c - d, dim=1)


def config_of(case: str, rows: int, width: int, code: int, probes: int, paper_mb: float) -> IndexConfig:
    """The index of a case; `code` is the bytes of a key under `paper`, `paper_mb` what its process holds."""
    cells = f"IVF{max(1, min(int(2 * math.sqrt(rows)), rows // 39))}"
    kinds = {
        "fast-scan": f"PCA{min(width, 2 * code)},{cells},PQ{code}x4fs" if width < 2 * code else
        f"PCA{2 * code},{cells},PQ{2 * code}x4fs",
        "PQ": f"PCA{min(width // code, 2) * code},{cells},PQ{code}",
        "RaBitQ": f"{cells},RaBitQ",
    }  # fmt: skip
    given: dict[str, Any] = {"kind": kinds.get(case, case.split(",")[0] if case.startswith("auto") else case)}
    if case in (IN_MEMORY, IN_BYTES):
        given["memory_gb"] = paper_mb * 2**20 / 1e9 if case == IN_MEMORY else rows * (code + BESIDE_A_CODE) / 1e9
    return resolved(IndexConfig(**given, bytes=code, probes=probes), rows, width)


def build(given: dict[str, Any]) -> dict[str, Any]:
    """Build an index, and say how long it took."""
    keys, config, path = keys_in(given), IndexConfig(**given["config"]), Path(given["index"])
    rows, clock = Rows(torch.tensor([0, len(keys) + 1])), _clock(given["busy"])
    began = clock()
    trained = path.with_suffix(".trained")
    faiss.write_index(train_index(keys, rows, config, SEED), str(trained))
    fill_index(trained, keys, rows, config.metric, path)
    trained.unlink()
    return {"build_seconds": clock() - began, "bytes_per_vector": path.stat().st_size / len(keys)}


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Search with an index that was built, and say how fast it is and what it finds."""
    path, config = Path(given["index"]), IndexConfig(**given["config"])
    keys, clock, k = keys_in(given), _clock(given["busy"]), given["k"]
    queries_ND = torch.from_numpy(np.load(path.parent.parent / "queries.npy"))
    true_NK = torch.from_numpy(np.load(path.parent / "true.npy"))
    rows, before = Rows(torch.tensor([0, len(keys) + 1])), anonymous_bytes()
    index: Index
    if config.kind == "exact":
        index = ExactIndex.over(keys, rows.all(), config.metric)
    else:
        index = open_faiss_index(path, keys, rows, config.metric, config.probes, by_lists=not given["scanned"])
    index.search(queries_ND[:1], k)
    held = anonymous_bytes() - before
    few = queries_ND[: len(true_NK)]
    some = queries_ND[:256] if config.kind == "exact" else queries_ND
    found = recall_from(index.search(few, k), few, index, true_NK, [128, k])
    singly = queries_ND[:64].split(1)
    return {
        "queries_per_s": len(some) / fastest(lambda: index.search(some, k), clock, given["tries"]),
        "queries_per_s_single": len(singly)
        / fastest(lambda: [index.search(one, k) for one in singly], clock, given["tries"]),
        "recall_at_1024": found[k],
        "recall_at_128": found[128],
        "memory_mb": held / 2**20,
    }


def keys_in(given: dict[str, Any]) -> Any:
    """The rows of a case: the first of all that were made."""
    return np.load(given["keys"], mmap_mode="r")[: given["rows"]]


def fastest(work: Callable[[], object], clock: Callable[[], float], tries: int) -> float:
    times = []
    for _ in range(tries):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)


def _clock(busy: bool) -> Callable[[], float]:
    return time.process_time if busy else time.perf_counter


def anonymous_bytes() -> int:
    """What this process holds in memory, maps of files left out."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024


def child(given: dict[str, Any]) -> dict[str, Any]:
    return (build if given.pop("build") else measure)(given)


def case_of(work: Path, rows: int, width: int, case: str, given: argparse.Namespace) -> dict[str, Any]:
    """One index over the first rows in a directory; what is there already is not made again."""
    folder = work / str(rows)
    beside = case_of(work, rows, width, PAPER, given)["memory_mb"] if case == IN_MEMORY else 0.0
    config = config_of(case.removesuffix(SCANNED), rows, width, given.bytes, given.probes, beside)
    index, scanned = folder / f"{named(config.kind)}.faiss", case.endswith(SCANNED)
    result = folder / f"{named(case)}.json"
    if not result.exists():
        order = {"keys": str(work / "keys.npy"), "rows": rows, "config": config.model_dump(mode="json"), "k": given.k}
        order |= {"index": str(index), "busy": given.busy, "tries": given.tries, "scanned": scanned}
        built = index.with_suffix(".built")
        if config.kind == "exact":
            built.write_text(json.dumps({"build_seconds": 0.0, "bytes_per_vector": 4.0 * width}))
        elif not built.exists():
            built.write_text(json.dumps(in_a_process(__file__, (), {**order, "build": True})))
        made = json.loads(built.read_text())
        about = {"rows": rows, "index": case, "kind": config.kind, "probes": config.probes}
        result.write_text(json.dumps({**about, **made, **in_a_process(__file__, (), {**order, "build": False})}))
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def named(case: str) -> str:
    """The name of a case's files."""
    return re.sub(r"\W+", "-", case)


def prepare(work: Path, states: Any, held: Any, sizes: list[int], given: argparse.Namespace) -> None:
    """Write the rows, the queries, and the true neighbours of the first queries at each size."""
    held = held[np.sort(np.random.default_rng(SEED).permutation(len(held))[: given.queries])]
    np.save(work / "queries.npy", held)
    path = work / "keys.npy"
    if not path.exists() or len(np.load(path, mmap_mode="r")) < max(sizes):
        inflated(states, max(sizes), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    for rows in sizes:
        (work / str(rows)).mkdir(exist_ok=True)
        if not (work / str(rows) / "true.npy").exists():
            keys, whole = np.load(path, mmap_mode="r")[:rows], Rows(torch.tensor([0, rows + 1]))
            true = nearest(torch.from_numpy(held[:CHECKED]), keys, whole, min(given.k, rows), "cosine")
            np.save(work / str(rows) / "true.npy", true.similarity.numpy())


def figure(cases: list[dict[str, Any]], path: Path) -> None:
    """Queries a second against recall: a line over the sizes for each named case, grey points for other codes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=(8.6, 4.2))
    names = [name for name in CASES if any(case["index"] == name for case in cases)]
    for name, marker in zip(names, "os^vDP*X<>", strict=False):
        own = sorted((case for case in cases if case["index"] == name), key=lambda case: case["rows"])
        line = [case["recall_at_1024"] for case in own], [case["queries_per_s"] for case in own]
        axes.plot(*line, marker=marker, label=name)
        for case, recall, speed in zip(own, *line, strict=True):
            if len(own) > 1:
                axes.annotate(f" {case['rows'] / 1e6:g}M", (recall, speed), fontsize=7)
    others = [case for case in cases if case["index"] not in names]
    points = [case["recall_at_1024"] for case in others], [case["queries_per_s"] for case in others]
    if others:
        axes.scatter(*points, s=14, color="0.6", zorder=0, label="other codes, all sizes")
    axes.set_yscale("log")
    axes.set_xlabel("recall@1024")
    axes.set_ylabel("queries a second")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    drawn.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="*", default=[], help="runs whose states are searched; several are joined")
    parser.add_argument("--states", nargs="*", default=[], metavar="FILE", help=".npy files of states")
    parser.add_argument("--rows", nargs="*", type=int, help="sizes of the store (default: the states that there are)")
    parser.add_argument(
        "--index", nargs="*", default=CASES, help=f"cases: {', '.join(CASES)}, or FAISS factory strings"
    )
    parser.add_argument("--k", type=int, default=1024)
    parser.add_argument("--queries", type=int, default=4096, help="queries of a batch, as in the search stage")
    parser.add_argument("--bytes", type=int, default=64, help="bytes of a key under paper (default: %(default)s)")
    parser.add_argument("--probes", type=int, default=32)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a directory where everything that is made stays")
    parser.add_argument("--all", action="store_true", help="show all cases that the directory has")
    parser.add_argument("--busy", action="store_true", help="count the processor's time: the machine is not idle")
    parser.add_argument("--figure", type=Path, help="write a figure to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(json.loads(given.child))))
        return
    with contextlib.ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        cases = table(work, given)
        if given.all:
            cases = sorted((json.loads(path.read_text()) for path in work.glob("*/*.json")), key=_place)
    if given.figure:
        figure(cases, given.figure)
    report(f"Search at k = {given.k}, {'the processor' if given.busy else 'elapsed'} time", cases, given.json)


def table(work: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case that was asked for."""
    states, held = real_states(given.run, given.states)
    sizes, width = given.rows or [len(states)], states.shape[1]
    prepare(work, states, held, sizes, given)
    print(f"{len(states):,} real states", file=sys.stderr)
    del states, held
    return [
        case
        for rows in sizes
        for case in one_by_one(
            f"search of {rows:,} rows", given.index, partial(case_of, work, rows, width, given=given)
        )
    ]


def _place(case: dict[str, Any]) -> tuple[int, int]:
    return case["rows"], CASES.index(case["index"]) if case["index"] in CASES else len(CASES)


if __name__ == "__main__":
    sys.exit(main())
