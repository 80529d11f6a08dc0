"""Changing the store of a run: add, remove, replace, synchronise, compact, erase.

Each change is one new generation. Everything it needs is on the disk before it is committed; what a killed writer left
is removed by the next one. `Book.refresh` moves a reader on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from gnnlm.artifact import ADDED
from gnnlm.config import load_config
from gnnlm.corpus.sources import Document
from gnnlm.corpus.stream import Stream, TextWriter, TokenizedDocument
from gnnlm.datastore.filter import Names
from gnnlm.errors import ConfigError, CorpusError
from gnnlm.generation import Generation, Segment, commit, generations_of, read_current
from gnnlm.generation.place import forget_uncommitted
from gnnlm.library.changes import Change, Entry, Erased
from gnnlm.library.compact import compacted
from gnnlm.library.erase import erase_unreferenced, remove_unreferenced
from gnnlm.library.making import SegmentMaker
from gnnlm.library.shelf import Place, Shelf, text_of, withdrawn
from gnnlm.library.texts import NewTexts
from gnnlm.progress import say, warn
from gnnlm.run import Run
from gnnlm.run.serving import as_built, check_trained, trained_of

MANY = 16  # segments from which on compacting is advised: every search goes through all of them
FOLDER_TAG = "folder:"  # the tag of documents that a folder is synchronised with


class Reader(Protocol):
    """Something that is open at a generation, such as a book."""

    def refresh(self) -> bool: ...


class Library:
    """The documents of a run. `gnnlm.Library("runs/mine")` opens it; nothing is loaded before it is needed."""

    def __init__(self, run: str | Path | Run) -> None:
        self.run = run if isinstance(run, Run) else Run(load_config(Path(run)), reading=True)
        self._texts = NewTexts(self.run)

    @cached_property
    def _maker(self) -> SegmentMaker:
        return SegmentMaker(self.run)

    # -- looking -------------------------------------------------------------------------------------------

    def documents(self) -> list[Entry]:
        """The documents that can be looked up, in the order of the store."""
        return Shelf(self.run, self._now()).entries()

    def history(self) -> list[Generation]:
        """Every generation, the run as it was built first."""
        self.run.open_all()
        return [as_built(self.run), *generations_of(self.run.root)]

    def _now(self) -> Generation:
        """The current generation; refused if its segments were made with other trained parts."""
        self.run.open_all()
        now = read_current(self.run.root)
        if now is None:
            return as_built(self.run)
        check_trained(self.run, now)
        return now

    # -- changing ------------------------------------------------------------------------------------------

    def add(self, paths: str | Path | Iterable[str | Path], *, tags: Iterable[str] = ()) -> Change:
        """Add the documents of files and folders. A document that is there with the same text is left as it is."""
        return self._add(self._texts.read(_listed(paths)), tags)

    def add_texts(self, texts: Mapping[str, str], *, tags: Iterable[str] = ()) -> Change:
        """Add documents given as texts by name."""
        return self._add(self._texts.given(texts), tags)

    def _add(self, documents: list[Document], tags: Iterable[str]) -> Change:
        with self._writing("add") as writing:
            new = self._texts.tokenized(documents)
            other = [one.name for one in new if writing.shelf.differs(one)]
            if other:
                raise CorpusError(
                    f"the store has a document named {other[0]!r} with other text"
                    + (f" (and {len(other) - 1} more such)" if len(other) > 1 else "")
                    + "; use replace, or give it another name"
                )
            return writing.change(new, [], tags)

    def replace(self, paths: str | Path | Iterable[str | Path], *, tags: Iterable[str] = ()) -> Change:
        """Replace documents by the files of the same names; their tags stay. Those with the same text are left."""
        return self._replace(self._texts.read(_listed(paths)), tags)

    def replace_texts(self, texts: Mapping[str, str], *, tags: Iterable[str] = ()) -> Change:
        """Replace documents by texts of the same names."""
        return self._replace(self._texts.given(texts), tags)

    def _replace(self, documents: list[Document], tags: Iterable[str]) -> Change:
        self._check_removing("replace")
        with self._writing("replace") as writing:
            new = self._texts.tokenized(documents)
            for one in new:
                if one.name not in writing.shelf.places:
                    raise CorpusError(f"the store has no document named {one.name!r} to replace; use add")
            gone = [place for one in new if writing.shelf.differs(one) for place in writing.shelf.places[one.name]]
            return writing.change(new, gone, tags)

    def remove(self, names: Names) -> Change:
        """Remove the documents that names, globs or tags (`tag:T`) name; no search finds them from now on."""
        self._check_removing("remove")
        with self._writing("remove") as writing:
            gone = writing.shelf.matching(names)
            if not gone:
                raise CorpusError("no document was named; name at least one")
            return writing.change([], gone, ())

    def sync(self, folder: str | Path) -> Change:
        """Make the store follow a folder: files that are new, changed or gone since it was last synchronised.

        Documents of the folder carry a tag with its path, by which those that are gone are known. Documents that the
        run is evaluated on are left out.
        """
        place = Path(folder).absolute()
        if not place.is_dir():
            raise CorpusError(f"{folder} is not a folder; expected one to follow")
        documents = self._texts.read([place])
        with self._writing("sync") as writing:
            held_out = self._texts.held_out_names
            new = self._texts.tokenized([one for one in documents if one.name not in held_out])
            shelf, tag = writing.shelf, f"{FOLDER_TAG}{place}"
            names = {one.name for one in new}
            gone = [at for one in new if shelf.differs(one) for at in shelf.places[one.name]]
            gone += [at for at in shelf.tagged(tag) if shelf.name_of(at) not in names]
            if gone:
                self._check_removing("sync")
            return writing.change(new, gone, [tag])

    def compact(self, *, erase: bool = False, wait: float = 10.0, readers: Iterable[Reader] = ()) -> Change:
        """Merge small segments, and leave removed documents out; states are copied, never encoded again.

        With `erase`, every file that holds removed documents is deleted, and the run is searched for what is left of
        them. Readers of older generations are waited for this many seconds; if they stay, erasing is refused.
        `readers` are books of this process, which move on to the new generation in between.
        """
        if erase:
            self._check_removing("erase")
        with self._writing("compact", tidy=not erase) as writing:
            made = compacted(self.run, writing.now, self._maker, writing.number)
            if made is not None:
                writing.commit(made)
            change = writing.done((), ())
            if not erase:
                remove_unreferenced(self.run.root, writing.now)
                return change
            for reader in readers:
                reader.refresh()
            erased = erase_unreferenced(self.run, writing.now, wait)
            return Erased(
                change.generation, (), (), change.rows, writing.seconds, (), erased.names, erased.searched,
                erased.found, erased.may_remember,
            )  # fmt: skip

    def renew(self) -> Change:
        """Make the segments that were added anew, with what the run has trained since, from their stored text.

        Documents that the rebuilt corpus has under the same name are not added twice.
        """
        with self._writing("renew", check=False) as writing:
            return writing.renew()

    # -- how -----------------------------------------------------------------------------------------------

    def _check_removing(self, what: str) -> None:
        if self.run.config.lm.continuous:
            raise ConfigError(
                f"{what}: under lm.continuous the states of later documents have read the removed text; build a run "
                "without the document"
            )

    @contextmanager
    def _writing(self, what: str, check: bool = True, tidy: bool = True) -> Iterator[Writing]:
        """Lock the run; within, nobody else changes it, and what a killed writer left is gone.

        Without `tidy`, segments that nobody needs are still there: erasing looks for their text everywhere.
        """
        self.run.open_all()
        with self.run.building():
            forget_uncommitted(self.run.root)
            found = read_current(self.run.root)
            now = as_built(self.run) if found is None else found
            if tidy:
                remove_unreferenced(self.run.root, now)
            if check and found is not None:
                check_trained(self.run, found)
            yield Writing(self, what, now)


class Writing:
    """A change that is being made, under the run's lock."""

    def __init__(self, library: Library, what: str, now: Generation) -> None:
        self._library, self._what, self.now = library, what, now
        self._run, self._began = library.run, time.monotonic()

    @property
    def number(self) -> int:
        """The number of the generation that is being made."""
        return self.now.number + 1

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @cached_property
    def shelf(self) -> Shelf:
        return Shelf(self._run, self.now)

    def change(self, given: Sequence[TokenizedDocument], gone: Sequence[Place], tags: Iterable[str]) -> Change:
        """Remove some documents, add those that are not there, and tag them all."""
        wanted = _checked_tags(tags)
        kept = {one.name: self.shelf.tags_at(at) for one in given for at in self.shelf.places.get(one.name, ())}
        new = [one for one in given if one.name not in self.shelf.places or self.shelf.differs(one)]
        same = [at for one in given if not self.shelf.differs(one) for at in self.shelf.places.get(one.name, ())]
        segments = self.shelf.without(gone)
        if not new and not any(segment.live for segment in segments):
            raise CorpusError("this would leave no document in the store; expected at least one: add others first")
        segments = self.shelf.tagged_with(segments, same, wanted)
        overlapping = self._library._texts.overlapping(new)
        if overlapping:
            names = [new[number].name for number in overlapping]
            warn(
                f"{len(names)} of the added documents share text with the valid or test split ({names[0]}): the run "
                "must not be evaluated with them, and evaluation leaves them out"
            )
        made = self._segments(new, {one.name: {*wanted, *kept.get(one.name, ())} for one in new}, set(overlapping))
        after = (*segments, *made)
        removed = tuple(self.shelf.name_of(at) for at in gone)
        if new or after != self.now.segments:
            self.commit(after, len(new), len(removed), {withdrawn(name) for name in removed})
        marked = tuple(new[number].name for number in overlapping)
        return self.done(tuple(one.name for one in new), removed, marked)

    def _segments(
        self, new: Sequence[TokenizedDocument], tags: Mapping[str, set[str]], overlapping: set[int]
    ) -> list[Segment]:
        """New documents as segments of at most `store.segment_tokens` positions."""
        vocab_size = self._run.artifact("encode").facts["vocab_size"]
        limit, made, some = self._run.config.store.segment_tokens, list[Segment](), list[int]()

        def make() -> None:
            text = TextWriter(vocab_size)
            for number in some:
                text.add(new[number])
            segment = self._library._maker.make(f"{ADDED}/{self.number:04d}.{len(made)}", text)
            names = sorted({tag for number in some for tag in tags[new[number].name]})
            tagged = {
                tag: tuple(place for place, number in enumerate(some) if tag in tags[new[number].name]) for tag in names
            }
            shared = tuple(place for place, number in enumerate(some) if number in overlapping)
            made.append(replace(segment, tags=tagged, overlapping=shared))
            some.clear()

        size = 0
        for number, document in enumerate(new):
            if some and size + len(document.tokens) + 1 > limit:
                make()
                size = 0
            some.append(number)
            size += len(document.tokens) + 1
        if some:
            make()
        return made

    def commit(self, segments: Sequence[Segment], added: int = 0, removed: int = 0, gone: Iterable[str] = ()) -> None:
        """Make a new generation of these segments the current one; `gone` identifies the names that were removed."""
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        trained = trained_of(self._run)
        left = self.now.withdrawn | set(gone)
        self.now = Generation(self.number, tuple(segments), trained, made, self._what, added, removed, left)
        commit(self._run.root, self.now)
        self.__dict__.pop("shelf", None)
        count = len(self.now.segments)
        say(f"{self._what}: generation {self.now.number}, {self.now.documents:,} documents, {self.now.rows:,} rows")
        if count > MANY and self._what != "compact":
            warn(
                f"the store has {count} segments, and every search goes through all of them; gnnlm compact merges them"
            )

    def done(self, added: tuple[str, ...], removed: tuple[str, ...], overlapping: tuple[str, ...] = ()) -> Change:
        return Change(self.now.number, added, removed, self.now.rows, self.seconds, overlapping)

    def renew(self) -> Change:
        """See `Library.renew`."""
        if self.now.number == 0 or dict(self.now.trained) == trained_of(self._run):
            return self.done((), ())
        built = Shelf(self._run, as_built(self._run))
        again = [at for name, places in built.places.items() if withdrawn(name) in self.now.withdrawn for at in places]
        segments, added, there = (
            built.without(again),
            list[str](),
            set(built.places) - {built.name_of(at) for at in again},
        )
        for number, segment in enumerate(one for one in self.now.segments if one.is_added):
            stream = text_of(self._run, segment, self.now.number)
            live = [place for place in range(segment.documents) if place not in set(segment.removed)]
            some = [place for place in live if stream.names[place] not in there]
            if some:
                segments.append(self._again(f"{ADDED}/{self.number:04d}.{number}", segment, stream, some))
                added += [stream.names[place] for place in some]
        self.commit(segments, len(added), len(again))
        remove_unreferenced(self._run.root, self.now)
        return self.done(tuple(added), tuple(built.name_of(at) for at in again))

    def _again(self, name: str, segment: Segment, stream: Stream, some: Sequence[int]) -> Segment:
        """Some documents of a segment as a new one, with what is trained now."""
        text = TextWriter(self._run.artifact("encode").facts["vocab_size"])
        documents = [Document(stream.names[place], stream.documents[place]["text"]) for place in some]
        for document in self._library._texts.tokenized(documents):
            text.add(document)
        made, where = self._library._maker.make(name, text), {place: new for new, place in enumerate(some)}
        tags = {tag: tuple(where[place] for place in places if place in where) for tag, places in segment.tags.items()}
        shared = tuple(where[place] for place in segment.overlapping if place in where)
        return replace(made, tags={tag: found for tag, found in tags.items() if found}, overlapping=shared)


def _listed(paths: str | Path | Iterable[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)


def _checked_tags(tags: Iterable[str]) -> set[str]:
    wanted = {tags} if isinstance(tags, str) else set(tags)
    for tag in wanted:
        if not isinstance(tag, str) or not tag or tag != tag.strip() or any(sign in tag for sign in "*?[\n\0"):
            raise ConfigError(
                f"expected a tag such as manual, without spaces at its ends or the signs * ? [ (got {tag!r})"
            )
    return wanted
