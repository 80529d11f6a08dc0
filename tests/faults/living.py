"""Changes of a store that are interrupted: the run that each is given, and what it must be in the end.

To have another change interrupted, add a `Change`.
"""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact
from gnnlm.artifact.manifest import MANIFEST, read_manifest
from gnnlm.generation import read_current
from gnnlm.generation.current import generation_file
from gnnlm.layout import SEGMENTS
from gnnlm.library.erase_scan import ErasedSamples
from tests.faults.fault import Ended, Fault, Signal, command, forked, run_command
from tests.library.conftest import make_text

TEXTS = {
    "first": {"one.txt": 1, "two.txt": 2},
    "second": {"three.txt": 3, "four.txt": 4},
    "other": {"one.txt": 5},
    "earlier": {"four.txt": 6, "five.txt": 7},  # as the folder `second` was before four.txt changed
}
ADD, MORE, REMOVE = "add {run} {texts}/first --tag kept", "add {run} {texts}/second", "remove {run} one.txt {document}"
LOOSE = ("gnnlm.log", ".lock", "tensorboard", "leases")  # what no generation names


@dataclass(frozen=True)
class Change:
    """A command, and the commands that made the run which it is given."""

    name: str
    command: str
    after: tuple[str, ...] = ()


CHANGES = (
    Change("add", ADD),
    Change("remove", REMOVE, (ADD,)),
    Change("replace", "replace {run} {texts}/other", (ADD,)),
    Change("sync", "sync {run} {texts}/second", ("add {run} {texts}/earlier --tag folder:{texts}/second",)),
    Change("compact", "compact {run}", (ADD, MORE, REMOVE)),
    Change("erase", "compact {run} --erase", (ADD, MORE, REMOVE)),
    Change("renew", "renew {run}", (ADD, "run {run} --rebuild --set train.lr=0.002")),
    Change("refit", "refit {run} --part mix", (ADD, REMOVE)),
)
NAMED = {change.name: change for change in CHANGES}


@dataclass(frozen=True)
class Whole:
    """A change that was not interrupted: the runs before and after it, and the records that they serve."""

    before: Path
    after: Path
    records: tuple[Any, Any]
    changes: int  # on the disk


@dataclass
class Living:
    """A folder with texts, and runs with stores that were changed without a fault; `base` is a finished run."""

    folder: Path
    base: Path
    _runs: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _whole: dict[str, Whole] = field(default_factory=dict)
    _scores: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        for folder, texts in TEXTS.items():
            place = self.folder / "texts" / folder
            place.mkdir(parents=True)
            for name, number in texts.items():
                (place / name).write_text(make_text(number, 3), encoding="utf-8")

    # -- commands --------------------------------------------------------------------------------------------

    def arguments(self, words: str, run: Path) -> list[str]:
        names = json.loads((self.base / "segments" / "0000" / "text" / "names.json").read_text())
        given = {"run": str(run), "texts": str(self.folder / "texts"), "document": names[0]}
        return [word.format(**given) for word in words.split()]

    def run(self, words: str, run: Path, fault: Fault | None = None, signalled: Signal | None = None) -> Ended:
        return command(run, *self.arguments(words, run), fault=fault, signalled=signalled)

    def made(self, *commands: str) -> Path:
        """The run in which these commands have changed the store."""
        if not commands:
            return self.base
        if commands not in self._runs:
            given, run = self.made(*commands[:-1]), self.folder / f"run-{len(self._runs)}"
            shutil.copytree(given, run)
            ended = self.run(commands[-1], run)
            assert ended.code == 0, ended.errors
            self._runs[commands] = run
        return self._runs[commands]

    def whole(self, change: Change) -> Whole:
        if change.name not in self._whole:
            before, after = self.made(*change.after), self.folder / f"after-{change.name}"
            shutil.copytree(before, after)
            ended = forked(partial(self._keeping_pieces, change.command, after), after)
            assert ended.code == 0, ended.errors
            self._whole[change.name] = Whole(before, after, (served(before), served(after)), ended.changes)
        return self._whole[change.name]

    def _keeping_pieces(self, words: str, run: Path) -> None:
        """Run a command in this process; if it erases, the pieces that it looks for are kept in a file."""
        of = ErasedSamples.of

        def kept(*arguments: Any) -> ErasedSamples:
            samples = of(*arguments)
            (self.folder / "pieces").write_bytes(pickle.dumps(samples))
            return samples

        ErasedSamples.of = kept  # type: ignore[method-assign]
        run_command(self.arguments(words, run))

    def prepare(self, change: Change, place: Path) -> Path:
        """The run that a command is given."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return Path(shutil.copytree(self.whole(change).before, place / "run"))

    def scores(self, run: Path) -> str:
        """The log-probabilities of a text, or the line that refuses them."""
        ended = self.run("score {run} {texts}/first/two.txt --json", run)
        return ended.output if ended.code == 0 else ended.error.replace(str(run), "RUN")

    # -- what must hold --------------------------------------------------------------------------------------

    def check(self, change: Change, run: Path, thorough: bool = True) -> None:
        """What was interrupted is old or new, says so, and can be finished: with the bytes of what never was."""
        self.check_finish(change, run, self.check_state(change, run, thorough))

    def check_state(self, change: Change, run: Path, thorough: bool = True) -> int:
        """0: what is served is the old generation, 1: the new one. `thorough`: doctor does all, a text is scored."""
        looked = forked(partial(look, run, thorough), run)
        whole, record = self.whole(change), served(run)
        assert record in whole.records, "between two generations"
        state = whole.records.index(record)
        if change.name == "renew" and not state:  # what was rebuilt no longer fits: the doctor names what mends it
            assert "gnnlm renew" in looked.output
        else:
            assert looked.code == 0, looked.output + looked.errors
        if thorough:
            known = (whole.before, whole.after)[state]
            if known not in self._scores:
                self._scores[known] = self.scores(known)
            assert self.scores(run) == self._scores[known]
        return state

    def check_finish(self, change: Change, run: Path, state: int) -> None:
        """The same command once more leaves what it leaves uninterrupted, and nothing else."""
        ended = self.run(change.command, run)
        if state and change.name == "remove":
            assert "no document of the store is named" in ended.error
        else:
            assert ended.code == 0, ended.errors
        expected, found = everything(self.whole(change).after), everything(run)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
        assert served(run) == self.whole(change).records[1]
        if change.name == "erase":
            assert self.left(run) == set()

    def left(self, run: Path) -> set[str]:
        """The files of a run that hold pieces of the erased documents, as erasing itself looks for them."""
        self.whole(NAMED["erase"])
        samples: ErasedSamples = pickle.loads((self.folder / "pieces").read_bytes())
        return {str(Path(path).relative_to(run)) for path in samples.search(run, lambda _: False)[0]}


def look(run: Path, thorough: bool) -> None:
    """`status` and `doctor`, one after the other in this process; fails unless both find nothing wrong."""
    from gnnlm.run import doctor

    if not thorough:
        doctor.CHECKS = {"files": doctor.CHECKS["files"]}
    for name in ("status", "doctor"):
        try:
            run_command([name, run])
        except SystemExit as ended:
            if ended.code:
                raise


def served(run: Path) -> Any:
    """The record of the generation that a run serves but for its time; what was added is whole. None: generation 0."""
    now = read_current(run)
    if now is None:
        return None
    made = {segment.path_of(kind): found for segment in now.segments for kind, found in segment.parts.items()}
    made |= {each.path: each.fingerprint for each in now.refitted.values()}
    for path, found in made.items():
        if not path.startswith(f"{SEGMENTS}/"):
            Artifact.open_part(run / path, found, generation_file(run, now.number)).verify(trust=False)
    return _untimed(now.as_json())


def everything(run: Path) -> dict[str, Any]:
    """All that is in a run directory by name, but for times and what no generation names."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run)
        if name.parts[0] in LOOSE:
            continue
        if path.is_dir():
            found[f"{name}/"] = None
        elif path.name == MANIFEST:
            found[str(name)] = read_manifest(path.parent).fingerprint
        elif name.parts[0] == "generations":
            found[str(name)] = _untimed(json.loads(path.read_bytes()))
        else:
            found[str(name)] = path.read_bytes()
    return found


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("made", "checksum")}
