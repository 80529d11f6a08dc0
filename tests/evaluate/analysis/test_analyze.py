"""gnnlm analyze as a whole: parts that are made once, resumed, left out with a reason, and one page of them."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from gnnlm.artifact import ArrayWriter, Draft
from gnnlm.config import load_config
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.evaluate.analysis import neighbour_counts
from gnnlm.evaluate.analysis.analysis_parts import PARTS
from gnnlm.evaluate.analysis.target_recall import RecallResult, show
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis, AnalysisOptions, asked_parts
from tests.cli import Process, error_line, finished, gnnlm
from tests.conftest import WriteConfig

SOME = ("neighbours", "recall")
TIMES = ("seconds", "tokens_per_s", "gnn_tokens_per_s", "memory_mb")  # measured anew each time


@pytest.fixture
def run_dir(tiny_run: Any, tmp_path: Path) -> Path:
    """A finished run of the test's own."""
    return Path(shutil.copytree(tiny_run.root, tmp_path / "a run"))


def analysis_of(root: Path) -> Analysis:
    return Analysis(Run(load_config(root), reading=True))


def build(root: Path, *names: str) -> dict[str, Any]:
    analysis = analysis_of(root)
    return analysis.build(analysis.plan(names))


def untimed(value: Any) -> Any:
    """A result without what differs from one measurement to the next."""
    if isinstance(value, dict):
        return {key: untimed(inner) for key, inner in value.items() if key not in TIMES}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


def test_the_command_prints_a_plan_the_page_and_one_object(run_dir: Path) -> None:
    parts = [word for name in SOME for word in ("--part", name)]
    first = gnnlm("analyze", run_dir, *parts, "--json")
    results = json.loads(first.stdout.splitlines()[-1])
    assert set(results) == set(SOME)
    assert "to do" in first.stdout
    assert str(run_dir / "analysis" / "index.html") in first.stdout
    buckets = results["recall"]["buckets"]
    assert {"low", "high", "tokens", "base", "gnn_knn", "absolute", "relative"} <= buckets[0].keys()
    assert {"k", "ppl", "memory_mb", "tokens_per_s"} <= results["neighbours"]["graph_k"][0].keys()
    assert json.loads((run_dir / "analysis" / "analysis.json").read_text()) == results
    files = {path.relative_to(run_dir / "analysis").as_posix() for path in (run_dir / "analysis").rglob("*.*")}
    assert {"index.html", "analysis.md", "recall/recall.csv", "recall/recall.svg", "recall/recall.png"} <= files

    made = {path: path.stat().st_mtime_ns for path in (run_dir / "analysis").glob("*/manifest.json")}
    again = gnnlm("analyze", run_dir, *parts, "--json")
    assert "recall: already done" in again.stderr
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    assert made == {path: path.stat().st_mtime_ns for path in (run_dir / "analysis").glob("*/manifest.json")}
    log = (run_dir / "gnnlm.log").read_text()
    assert "recall: +GNN+kNN gains most" in log


def test_a_part_alone_leaves_the_others_on_the_page(run_dir: Path) -> None:
    build(run_dir, "recall")
    page = (run_dir / "analysis" / "index.html").read_text()
    assert "Number of neighbours</dt><dd>not made yet" in page
    assert f"gnnlm analyze &#x27;{run_dir}&#x27; --part neighbours" in page
    assert set(build(run_dir, "neighbours")) == set(SOME)
    assert "neighbours</dt>" not in (run_dir / "analysis" / "index.html").read_text()


def test_a_preparation_can_be_asked_for(run_dir: Path) -> None:
    assert build(run_dir, "scored-test") == {}
    (step,) = analysis_of(run_dir).plan(["scored-test"])
    assert (step.state, step.words, step.seconds) == ("done", "done", 0.0)


def test_interrupted_and_resumed_equals_uninterrupted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were committed are not measured again."""
    whole = build(run_dir, "neighbours")
    shutil.rmtree(run_dir / "analysis" / "neighbours")
    row_of, measured = neighbour_counts._graph_row, []

    def once(subject: Any, k: int) -> Any:
        if measured:
            raise KeyboardInterrupt
        measured.append(k)
        return row_of(subject, k)

    monkeypatch.setattr(neighbour_counts, "_graph_row", once)
    with pytest.raises(KeyboardInterrupt):
        build(run_dir, "neighbours")
    (*_, step) = analysis_of(run_dir).plan(["neighbours"])
    assert (step.state, step.words) == ("half-done", "resumes")
    monkeypatch.setattr(neighbour_counts, "_graph_row", lambda subject, k: measured.append(k) or row_of(subject, k))
    assert untimed(build(run_dir, "neighbours")) == untimed(whole)
    assert measured == [row["k"] for row in whole["neighbours"]["graph_k"]]
    assert "resuming where it was interrupted" in (run_dir / "gnnlm.log").read_text()


def test_a_pass_that_is_interrupted_resumes_to_the_same_bytes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnnlm.evaluate.analysis import score_cache

    shards, commit, commits = score_cache.shards, Draft.commit, []
    monkeypatch.setattr(score_cache, "shards", lambda starts, done: shards(starts, done, least=100))
    build(run_dir, "scored-test")
    folder = run_dir / "analysis" / "scored-test"
    whole = {file.name: file.read_bytes() for file in folder.glob("*.npy")}
    shutil.rmtree(folder)

    def one_commit(draft: Draft) -> None:
        commit(draft)
        commits.append(draft.step)
        if len(commits) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Draft, "commit", one_commit)
    rows: dict[str, int] = {}
    append = ArrayWriter.append
    with pytest.raises(KeyboardInterrupt):
        build(run_dir, "scored-test")

    def counted(writer: ArrayWriter, values: Any) -> None:
        rows[writer.path.name] = rows.get(writer.path.name, 0) + len(values)
        append(writer, values)

    monkeypatch.setattr(ArrayWriter, "append", counted)
    build(run_dir, "scored-test")
    assert {file.name: file.read_bytes() for file in folder.glob("*.npy")} == whole
    assert 0 < rows["base.log_probs.npy"] < analysis_of(run_dir).subject.report.test_tokens


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(run_dir: Path) -> None:
    with Process("gnnlm", "analyze", run_dir, "--part", "neighbours") as process:
        process.wait_until((run_dir / "analysis" / "scored-test").is_dir)
        process.send_signal(signal.SIGINT)
        assert "error: interrupted; finished work is kept" in finished(process, code=130).stderr
    assert set(build(run_dir, "neighbours")) == {"neighbours"}


def test_a_run_with_some_stages_says_what_is_missing(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "report")
    analysis = analysis_of(run_dir)
    steps = analysis.plan(SOME)
    assert [step.name for step in steps] == list(SOME), "prepared for nothing"
    assert all(step.words == "cannot be made: needs the stage eval (missing)" for step in steps)
    assert analysis.build(steps) == {}
    page = (run_dir / "analysis" / "index.html").read_text()
    assert "No report yet" in page
    assert "needs the stage eval (missing)" in page
    assert f"gnnlm run &#x27;{run_dir}&#x27;" in page


def test_a_changed_run_makes_its_parts_anew(run_dir: Path) -> None:
    build(run_dir, "recall")
    config = load_config(run_dir, ("eval.bootstrap=60",))
    Run(config).build("eval", rebuild=True)
    analysis = analysis_of(run_dir)
    (step,) = analysis.plan(["recall"])
    assert (step.state, step.words) == ("stale", "made anew")
    assert set(analysis.build([])) == set(), "what was made from another report is not shown"
    assert set(build(run_dir, "recall")) == {"recall"}


def test_a_stale_stage_names_the_command_that_replaces_it(run_dir: Path) -> None:
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace("bootstrap: 50", "bootstrap: 51"))
    (step,) = analysis_of(run_dir).plan(["recall"])
    assert step.obstacle is not None
    assert "eval (stale)" in step.obstacle.why
    assert step.obstacle.command.endswith("--rebuild")


def test_a_run_without_a_network_has_the_parts_that_need_none(write_config: WriteConfig) -> None:
    config = write_config(gnn={"layers": 0})
    gnnlm("run", config)
    root = Path(load_config(config).run)
    results = build(root, *SOME)
    assert set(results) == set(SOME)
    assert results["neighbours"]["graph_k"] == []
    assert "knn" in results["recall"]["all"]
    needing = [name for name, part in PARTS.items() if part.gnn]
    for step in analysis_of(root).plan(needing):
        assert step.obstacle is None or "gnn.layers: 0" in step.obstacle.why


def test_a_part_that_fails_does_not_take_the_others_with_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ArtifactError("no <b>luck</b>")

    monkeypatch.setattr(neighbour_counts, "measure", refuse)
    analysis = analysis_of(run_dir)
    with pytest.raises(ArtifactError, match=r"the part neighbours could not be made, all others are in .*: no <b>luck"):
        analysis.build(analysis.plan(SOME))
    page = (run_dir / "analysis" / "index.html").read_text()
    assert "no &lt;b&gt;luck" in page
    assert 'id="recall"' in page


# -- mistakes --------------------------------------------------------------------------------------------------


def test_no_such_part(run_dir: Path) -> None:
    words = error_line("analyze", run_dir, "--part", "recal")
    assert "no part named 'recal'; did you mean recall?" in words
    with pytest.raises(ConfigError, match="the analysis has neighbours, recall"):
        analysis_of(run_dir).plan(["zzz"])
    assert not (run_dir / "analysis").exists()


def test_a_run_that_is_being_built_is_left_alone(run_dir: Path) -> None:
    with (run_dir / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match="another gnnlm process is building"):
            analysis_of(run_dir)
    analysis = analysis_of(run_dir)
    steps = analysis.plan(["recall"])
    with (run_dir / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match="another gnnlm process is building"):
            analysis.build(steps)
    assert not (run_dir / "analysis").exists()


def test_a_run_that_was_rebuilt_meanwhile_is_refused(run_dir: Path) -> None:
    analysis = analysis_of(run_dir)
    steps = analysis.plan(["recall"])
    Run(load_config(run_dir)).build("eval", rebuild=True)
    with pytest.raises(ArtifactError, match="replaced"):
        analysis.build(steps)


def test_something_else_in_the_place_of_the_analysis(run_dir: Path) -> None:
    (run_dir / "analysis").write_text("mine")
    assert "is a file, where the analysis keeps its folder" in error_line("analyze", run_dir)
    assert (run_dir / "analysis").read_text() == "mine"


def test_somebody_elses_files_are_never_replaced(run_dir: Path) -> None:
    (run_dir / "analysis" / "recall").mkdir(parents=True)
    (run_dir / "analysis" / "recall" / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"holds notes\.txt"):
        build(run_dir, "recall")
    assert (run_dir / "analysis" / "recall" / "notes.txt").read_text() == "mine"


def test_the_page_that_cannot_be_written_is_named(run_dir: Path) -> None:
    (run_dir / "analysis" / "index.html").mkdir(parents=True)
    assert "index.html" in error_line("analyze", run_dir, "--part", "recall")


def test_the_parts_asked_for() -> None:
    assert asked_parts(None, AnalysisOptions()) == list(PARTS)
    assert asked_parts(["recall", "recall"], AnalysisOptions()) == ["recall"]
    with pytest.raises(ConfigError, match="add --train"):
        asked_parts(["components"], AnalysisOptions())
    assert asked_parts(["components"], AnalysisOptions(train=True)) == ["components"]
    for mistake in ({"steps": 3}, {"components": ("layers",)}):
        with pytest.raises(ConfigError, match="add --train"):
            AnalysisOptions(**mistake)  # type: ignore[arg-type]


def test_showing_needs_only_the_result(run_dir: Path) -> None:
    """A page is made from results alone, so that it can be made again without measuring."""
    result = RecallResult.model_validate(build(run_dir, "recall")["recall"])
    again = RecallResult.model_validate(json.loads(json.dumps(result.as_json())))
    assert show(again).tables[0].cells() == show(result).tables[0].cells()
