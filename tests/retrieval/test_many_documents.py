"""Five million tiny documents: written, opened and searched with the memory of a segment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENTS = 5_000_000
CHILD = """
import sys
from pathlib import Path

import numpy as np
import torch

from gnnlm.artifact import Draft
from gnnlm.corpus.stream import Stream
from gnnlm.corpus.text_writer import SplitWriter
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.retrieval.index import Rows
from gnnlm.retrieval.search import LeakageRule, Queries


def peak():
    return int(next(s for s in open("/proc/self/status") if s.startswith("VmHWM")).split()[1]) * 1024


before, count = peak(), int(sys.argv[2])
with Draft(Path(sys.argv[1]) / "corpus", "corpus", {}) as draft:
    writer = SplitWriter(draft, "train", 256, segment=1_000_000)
    for number in range(count):
        writer.add(TokenizedDocument(str(number), "ab", [97, 98], [0, 1]))
    made = draft.finish({"train": writer.finish()})
stream = Stream(made, "train")
rows = Rows.of(stream)
assert (len(stream), len(rows)) == (3 * count, 2 * count)
found = set()
for start in range(0, len(rows), len(rows) // 50):
    some = torch.arange(start, min(start + 4096, len(rows)))
    positions = rows.positions(some)
    assert torch.equal(positions, some // 2 * 3 + some % 2)
    keys = np.zeros((len(stream), 0), np.float16)
    allowed = Queries(stream, keys, positions.numpy(), 4, LeakageRule(8, 1, True)).allowed(positions.numpy(), None)
    assert torch.equal(allowed.barred[0], positions // 3 * 3)
    assert torch.equal(allowed.barred[1], positions // 3 * 3 + 2)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """Twenty bytes a document for where it begins, and one segment of 333,333 documents while it is written."""
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(DOCUMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    held = int(done.stdout)
    print(f"{held / 2**20:.0f} MB")
    assert held < 600 * 2**20
