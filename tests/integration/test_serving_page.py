"""The examples of docs/serving.md run against a server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gnnlm.serve.limits import Limits
from gnnlm.serve.runs import ServedRun, ServedRuns
from tests.serve.conftest import serving

pytestmark = pytest.mark.integration
PAGE = (Path(__file__).parent.parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def address(served: ServedRuns) -> Iterator[str]:
    (run,) = served
    with serving(ServedRuns([ServedRun("mine", run.book, run.report)]), Limits()) as (address, _):
        yield address


def test_python_examples(address: str) -> None:
    pytest.importorskip("openai")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block.replace("http://127.0.0.1:8000", address), "docs/serving.md", "exec"), names)
    assert len(names["choice"].gnnlm["tokens"]) == 20
    assert names["chunk"].choices[0].finish_reason in ("length", "stop")  # sampled: it may end by itself


def test_curl_examples(address: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        command = block.replace("http://127.0.0.1:8000", address)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        assert '"model":"mine"' in done.stdout


def test_limits_on_the_page_are_those_of_the_code() -> None:
    shown = dict(re.findall(r"^\| `--([a-z-]+)` \| ([\d,]+(?: MiB)?) \|", PAGE, flags=re.MULTILINE))
    limits = Limits()
    assert len(shown) == 9
    for name, value in shown.items():
        number = int(value.split()[0].replace(",", "")) * (2**20 if value.endswith("MiB") else 1)
        assert getattr(limits, name.replace("-", "_")) == number
