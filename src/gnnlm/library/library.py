"""Changing the store of a run: add, remove, replace, synchronise, compact, erase, refit.

Each change is one new generation. Everything it needs is on the disk before it is committed; what a killed writer left
is removed by the next one. `Book.refresh` moves a reader on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gnnlm.config import load_config
from gnnlm.corpus.document import Document
from gnnlm.datastore.filter import Names
from gnnlm.errors import ConfigError, CorpusError
from gnnlm.generation import Generation, generations_of, read_current
from gnnlm.generation.current import forget_uncommitted
from gnnlm.library.catalogue import Catalogue
from gnnlm.library.compact import compacted
from gnnlm.library.current_evaluation import CurrentPerplexity, evaluate_current
from gnnlm.library.erase import erase_unreferenced, remove_unreferenced
from gnnlm.library.ingest import TextIngest
from gnnlm.library.refit import folder_of, refitted
from gnnlm.library.results import CatalogueEntry, Change, ErasureChange, Refit
from gnnlm.library.segment_builder import SegmentBuilder
from gnnlm.library.transaction import Transaction, checked_tags
from gnnlm.run import Run
from gnnlm.run.snapshot import Snapshot

FOLDER_TAG = "folder:"  # the tag of documents that a folder is synchronised with


class Refreshable(Protocol):
    """Something that is open at a generation, such as a book."""

    def refresh(self) -> bool: ...


class Library:
    """The documents of a run. `gnnlm.Library("runs/mine")` opens it; nothing is loaded before it is needed."""

    def __init__(self, run: str | Path | Run) -> None:
        self.run = run if isinstance(run, Run) else Run(load_config(Path(run)), reading=True)
        self._ingest = TextIngest(self.run)

    # -- looking -------------------------------------------------------------------------------------------

    def documents(self) -> list[CatalogueEntry]:
        """Return the documents that can be looked up, in the order of the store."""
        return Catalogue(self._now()).entries()

    def history(self) -> list[Generation]:
        """Return every generation, beginning with the run as it was built."""
        self.run.open_all()
        return [self.run.snapshot.generation, *generations_of(self.run.root)]

    def evaluate(self) -> CurrentPerplexity:
        """Return the perplexity of test now, without documents that overlap with valid or test."""
        return evaluate_current(self.run)

    def _now(self) -> Snapshot:
        """Return the current generation; refuse one whose segments were made with artifacts that were rebuilt since."""
        self.run.open_all()
        now = self.run.snapshot.at(read_current(self.run.root))
        now.check_current()
        return now

    # -- changing ------------------------------------------------------------------------------------------

    def add(self, paths: str | Path | Iterable[str | Path], *, tags: Iterable[str] = ()) -> Change:
        """Add the documents of files and folders. A document that is there with the same text is left as it is."""
        return self._add(self._ingest.read(_listed(paths)), tags)

    def add_texts(self, texts: Mapping[str, str], *, tags: Iterable[str] = ()) -> Change:
        """Add documents given as texts by name."""
        return self._add(self._ingest.given(texts), tags)

    def _add(self, documents: list[Document], tags: Iterable[str]) -> Change:
        wanted = checked_tags(tags)
        with self._writing("add") as writing:
            new = self._ingest.tokenized(documents)
            other = [one.name for one in new if writing.catalogue.differs(one)]
            if other:
                raise CorpusError(
                    f"the store has a document named {other[0]!r} with other text"
                    + (f" (and {len(other) - 1} more such)" if len(other) > 1 else "")
                    + "; use replace, or give it another name"
                )
            return writing.change(new, [], wanted)

    def replace(self, paths: str | Path | Iterable[str | Path], *, tags: Iterable[str] = ()) -> Change:
        """Replace documents by the files of the same names; their tags stay. Those with the same text are left."""
        return self._replace(self._ingest.read(_listed(paths)), tags)

    def replace_texts(self, texts: Mapping[str, str], *, tags: Iterable[str] = ()) -> Change:
        """Replace documents by texts of the same names."""
        return self._replace(self._ingest.given(texts), tags)

    def _replace(self, documents: list[Document], tags: Iterable[str]) -> Change:
        self._check_removing("replace")
        wanted = checked_tags(tags)
        with self._writing("replace") as writing:
            new = self._ingest.tokenized(documents)
            for one in new:
                if one.name not in writing.catalogue.places:
                    raise CorpusError(f"the store has no document named {one.name!r} to replace; use add")
            gone = [
                place for one in new if writing.catalogue.differs(one) for place in writing.catalogue.places[one.name]
            ]
            return writing.change(new, gone, wanted)

    def remove(self, names: Names) -> Change:
        """Remove the documents that names, globs or tags (`tag:T`) name; no search finds them from now on."""
        self._check_removing("remove")
        with self._writing("remove") as writing:
            gone = writing.catalogue.matching(names)
            if not gone:
                raise CorpusError("no document was named; name at least one")
            return writing.change([], gone, set())

    def sync(self, folder: str | Path) -> Change:
        """Make the store follow a folder: files that are new, changed or gone since it was last synchronised.

        Documents of the folder carry a tag with its path, by which those that are gone are known. Documents that the
        run is evaluated on are left out.
        """
        place = Path(folder).absolute()
        if not place.is_dir():
            raise CorpusError(f"{folder} is not a folder; expected one to follow")
        documents = self._ingest.read([place])
        with self._writing("sync") as writing:
            held_out = self._ingest.held_out_names
            new = self._ingest.tokenized([one for one in documents if one.name not in held_out])
            there, tag = writing.catalogue, f"{FOLDER_TAG}{place}"
            names = {one.name for one in new}
            gone = [at for one in new if there.differs(one) for at in there.places[one.name]]
            gone += [at for at in there.tagged(tag) if there.name_of(at) not in names]
            if gone:
                self._check_removing("sync")
            return writing.change(new, gone, {tag})

    def compact(self, *, erase: bool = False, wait: float = 10.0, readers: Iterable[Refreshable] = ()) -> Change:
        """Merge small segments, and leave removed documents out; states are copied, never encoded again.

        With `erase`, every file that holds removed documents is deleted, and the run is searched for what is left of
        them. Readers of older generations are waited for this many seconds; if they stay, erasing is refused.
        `readers` are books of this process, which move on to the new generation in between.
        """
        if erase:
            self._check_removing("erase")
        with self._writing("compact", tidy=not erase) as writing:
            made = compacted(writing.snapshot, writing.builder, self._ingest.vocab_size)
            if made is not None:
                writing.commit(made)
            change = writing.done((), ())
            if not erase:
                remove_unreferenced(self.run.root, writing.now)
                return change
            for reader in readers:
                reader.refresh()
            erased = erase_unreferenced(self.run, writing.now, wait)
            return ErasureChange(
                generation=change.generation,
                rows=change.rows,
                seconds=writing.seconds,
                erased=erased.names,
                searched=erased.searched,
                found=erased.found,
                may_remember=erased.may_remember,
            )

    def renew(self) -> Change:
        """Build added segments again from their stored text, with what the run has trained since.

        Documents that the rebuilt corpus has under the same name are not added twice. What was refitted before is left
        behind: it does not fit what was rebuilt. If nothing was rebuilt, only added segments with damaged files are
        made anew.
        """
        with self._writing("renew", check=False) as writing:
            return writing.renew()

    def refit(self, part: str) -> Refit:
        """Fit `mix`, `index` or `gnn` again with the store as it is served now; `gnn` fits the mix too.

        A part that was fitted with this very store is left as it is. A refit that was interrupted goes on where it was.
        """
        with self._writing(f"refit {part}", resume=True) as writing:
            made = refitted(self.run, writing.now, part)
            stages = [name for name, one in made.refitted.items() if writing.now.refitted.get(name) != one]
            if stages:
                writing.commit(made.segments, refitted=made.refitted)
                remove_unreferenced(self.run.root, writing.now)
            done = writing.done((), ())
            return Refit(done.generation, rows=done.rows, seconds=done.seconds, part=part, stages=tuple(stages))

    # -- how -----------------------------------------------------------------------------------------------

    def _check_removing(self, what: str) -> None:
        if self.run.config.lm.continuous:
            raise ConfigError(
                f"{what}: under lm.continuous the states of later documents have read the removed text; build a run "
                "without the document"
            )

    @contextmanager
    def _writing(self, what: str, check: bool = True, tidy: bool = True, resume: bool = False) -> Iterator[Transaction]:
        """Lock the run against other writers, and remove what a killed writer left.

        Without `tidy`, segments that nobody needs are still there: erasing looks for their text everywhere. With
        `resume`, what an interrupted refit left is still there.
        """
        self.run.open_all()
        with self.run.building():
            forget_uncommitted(self.run.root)
            found = read_current(self.run.root)
            now = found if found.number else self.run.snapshot.generation
            if tidy:
                remove_unreferenced(self.run.root, now, folder_of(self.run, now) if resume else None)
            snapshot = self.run.snapshot.at(now)
            if check:
                snapshot.check_current()
            builder = SegmentBuilder(self.run.snapshot if snapshot.rebuilt_stages else snapshot)
            yield Transaction(self.run, self._ingest, builder, what, now)


def _listed(paths: str | Path | Iterable[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)
