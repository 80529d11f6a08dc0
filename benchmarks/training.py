"""Training the graph network: tokens/s and peak memory against k, batch and window.

    .venv/bin/python benchmarks/training.py [--run runs/demo] [--json]

Every case is a separate process that runs whole steps (graph, forward, frozen softmax, backward, optimizer) on a real
run's train split. One parameter is varied at a time around k = 32, 4 blocks of 128 tokens, l = r = 1, preset
`default`; `updates` adds neighbour updates. `against_half_k`: the time of a step over that of a step with half the k.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from common import arguments, best_seconds, in_a_process, open_run, peak_bytes, report

from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.train.batches import BlockOrder
from gnnlm.train.train_gnn import make_optimizer

AROUND = {
    "preset": "default", "updates": False, "k": 32, "blocks": 4, "reach": 1, "precision": "fp32", "checkpoint": False,
}  # fmt: skip
STEPS = 4


def measure(case: dict[str, Any], run: str) -> dict[str, Any]:
    made = open_run(run)
    gnn = made.config.gnn.model_copy(
        update={
            "preset": case["preset"],
            "neighbour_updates": case["updates"],
            "left": case["reach"],
            "right": case["reach"],
        }
    )
    torch.manual_seed(0)
    parts = made.snapshot
    head = parts.head
    model = GnnModel(resolve_options(gnn, head.width), head)
    model.checkpoint = case["checkpoint"]
    source, graphs = parts.searched("train"), replace(parts.graphs, left=case["reach"], right=case["reach"])
    order = BlockOrder(len(source.table), 128, case["blocks"], 0)
    optimizer = make_optimizer(model, made.config.train)
    used, distinct, number = 0, 0, 0

    def step() -> None:
        nonlocal used, distinct, number
        positions = source.table.positions(order(number))
        number += 1
        graph = graphs(source.context(positions), source.table.at(positions, case["k"]))
        used, distinct = used + int(graph.edge_BTK.sum()), distinct + len(graph.windows.rows_U)
        targets = source.text.tokens(positions)
        with torch.autocast("cpu", torch.bfloat16, enabled=case["precision"] == "bf16"):
            states_BTD, _ = model(graph)
        real = targets >= 0
        loss = -head.target_log_probs(states_BTD[real].float(), targets[real]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = best_seconds(step, STEPS, at_most=60)
    return {"step_s": seconds, "bytes": peak_bytes(), "unique_ratio": used / distinct}


def main() -> None:
    parser = arguments(__doc__ or "")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(json.loads(given.child), given.run)))
        return
    plans: list[dict[str, Any]] = [{"k": k} for k in (8, 16, 32, 64, 128)]
    plans += [{"blocks": blocks} for blocks in (1, 2, 8)]
    plans += [{"reach": reach} for reach in (2,)]
    plans += [{"updates": True, "k": k} for k in (8, 16, 32)]
    plans += [{"preset": "paper", "updates": updates} for updates in (False, True)]
    plans += [{"preset": "paper", "updates": updates, "precision": "bf16"} for updates in (False, True)]
    plans += [{"preset": "paper", "updates": True, "checkpoint": True}]
    cases: list[dict[str, Any]] = []
    for number, plan in enumerate(plans, 1):
        case = {**AROUND, **plan}
        print(f"training: {number}/{len(plans)}, {plan}", file=sys.stderr, flush=True)
        result = in_a_process(__file__, ["--run", given.run], case)
        half = [c for c in cases if {**case, "k": case["k"] // 2}.items() <= c.items()]
        bare = [
            c for c in cases if case["updates"] and {**case, "updates": False, "checkpoint": False}.items() <= c.items()
        ]
        cases.append(
            {
                **case,
                "unique_ratio": result["unique_ratio"],
                "step_s": result["step_s"],
                "tokens_per_s": 128 * case["blocks"] / result["step_s"],
                "peak_mb": result["bytes"] / 1e6,
                "against_half_k": result["step_s"] / half[0]["step_s"] if half else None,
                "against_no_updates": result["step_s"] / bare[0]["step_s"] if bare else None,
            }
        )
    report("GNN training steps", cases, given.json, rows_from=given.run)


if __name__ == "__main__":
    main()
