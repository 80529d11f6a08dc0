"""A change of the store that is being made: which documents come and go, the new segments, the commit."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from gnnlm.corpus.document import Document, TokenizedDocument
from gnnlm.corpus.stream import TEXT, Stream
from gnnlm.corpus.text_writer import TextWriter
from gnnlm.errors import ArtifactError, ConfigError, CorpusError, VersionError
from gnnlm.generation import Generation, RefittedArtifact, SegmentRecord, commit
from gnnlm.layout import ADDED
from gnnlm.library.catalogue import Catalogue, Place, name_digest, text_of
from gnnlm.library.erase import remove_unreferenced
from gnnlm.library.ingest import TextIngest
from gnnlm.library.results import Change
from gnnlm.library.segment_builder import SegmentBuilder
from gnnlm.progress import say, warn
from gnnlm.run import Run
from gnnlm.run.snapshot import Snapshot

MANY = 16  # segments from which on compacting is advised: every search goes through all of them


class Transaction:
    """A change that is being made, under the run's lock."""

    def __init__(self, run: Run, texts: TextIngest, builder: SegmentBuilder, what: str, now: Generation) -> None:
        self._run, self._texts, self.builder, self._what, self.now = run, texts, builder, what, now
        self._began = time.monotonic()

    @property
    def snapshot(self) -> Snapshot:
        """The generation that is served, after what this transaction has committed."""
        return self._run.snapshot.at(self.now)

    @property
    def number(self) -> int:
        """The number of the generation that is being made."""
        return self.now.number + 1

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @cached_property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.snapshot)

    def change(self, given: Sequence[TokenizedDocument], gone: Sequence[Place], wanted: set[str]) -> Change:
        """Remove some documents, add those that are not there, and tag them all."""
        there = self.catalogue
        kept = {one.name: there.tags_at(at) for one in given for at in there.places.get(one.name, ())}
        new = [one for one in given if one.name not in there.places or there.differs(one)]
        same = [at for one in given if not there.differs(one) for at in there.places.get(one.name, ())]
        segments = there.without(gone)
        if not new and not any(segment.live for segment in segments):
            raise CorpusError("this would leave no document in the store; expected at least one: add others first")
        segments = there.tagged_with(segments, same, wanted)
        overlapping = self._texts.overlapping(new)
        if overlapping:
            names = [new[number].name for number in overlapping]
            warn(
                f"{len(names)} of the added documents share text with the valid or test split ({names[0]}): the run "
                "must not be evaluated with them, and evaluation leaves them out"
            )
        made = self._segments(new, {one.name: {*wanted, *kept.get(one.name, ())} for one in new}, set(overlapping))
        after = (*segments, *made)
        removed = tuple(there.name_of(at) for at in gone)
        if new or after != self.now.segments:
            self.commit(after, len(new), len(removed), {name_digest(name) for name in removed})
        marked = tuple(new[number].name for number in overlapping)
        return self.done(tuple(one.name for one in new), removed, marked)

    def _segments(
        self, new: Sequence[TokenizedDocument], tags: Mapping[str, set[str]], overlapping: set[int]
    ) -> list[SegmentRecord]:
        """Build segments of at most `store.segment_tokens` positions from new documents."""
        limit, made, some = self._run.config.store.segment_tokens, list[SegmentRecord](), list[int]()

        def make() -> None:
            text = TextWriter(self._texts.vocab_size)
            for number in some:
                text.add(new[number])
            segment = self.builder.build(f"{ADDED}/{self.number:04d}.{len(made)}", text)
            names = sorted({tag for number in some for tag in tags[new[number].name]})
            tagged = {
                tag: tuple(place for place, number in enumerate(some) if tag in tags[new[number].name]) for tag in names
            }
            shared = tuple(place for place, number in enumerate(some) if number in overlapping)
            made.append(replace(segment, tags=tagged, overlapping=shared, unseen=tuple(range(len(some)))))
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

    def commit(
        self,
        segments: Sequence[SegmentRecord],
        added: int = 0,
        removed: int = 0,
        gone: Iterable[str] = (),
        refitted: Mapping[str, RefittedArtifact] | None = None,
    ) -> None:
        """Commit a generation of these segments; `gone` has the digests of removed names.

        It has what is `refitted` in place of what stages have trained; if that is not given, what the last one has.
        """
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        own = self.now.refitted if refitted is None else refitted
        trained, left = self._run.snapshot.fingerprints(own), self.now.withdrawn | set(gone)
        self.now = Generation(self.number, tuple(segments), trained, made, self._what, added, removed, left, own)
        commit(self._run.root, self.now)
        self.__dict__.pop("catalogue", None)
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
        if self.now.number == 0:
            return self.done((), ())
        if not self.snapshot.rebuilt_stages:
            return self._mend()
        if self.now.refitted:
            say(f"renew: {', '.join(self.now.refitted)} of the rebuilt run are served from now on, as built")
        built = Catalogue(self._run.snapshot)
        left = self.now.withdrawn
        again = [at for name, places in built.places.items() if name_digest(name) in left for at in places]
        there = {name for name in built.places if name_digest(name) not in left}
        segments, added = built.tagged_as(built.without(again), self._tags_by_name()), list[str]()
        for number, segment in enumerate(one for one in self.now.segments if one.is_added):
            stream = self._text_left(segment)
            if stream is None:
                continue
            some = [place for place in _live(segment) if stream.names[place] not in there]
            if some:
                segments.append(self._again(f"{ADDED}/{self.number:04d}.{number}", segment, stream, some, some))
                added += [stream.names[place] for place in some]
        self.commit(segments, len(added), len(again), refitted={})
        remove_unreferenced(self._run.root, self.now)
        return self.done(tuple(added), tuple(built.name_of(at) for at in again))

    def _again(
        self, name: str, segment: SegmentRecord, stream: Stream, some: Sequence[int], unseen: Collection[int]
    ) -> SegmentRecord:
        """Build some documents of a segment again, with what is trained now; the network has not seen `unseen`."""
        text = TextWriter(self._texts.vocab_size)
        documents = [Document(stream.names[place], stream.documents[place].text) for place in some]
        tokenized = self._texts.tokenized(documents)
        for document in tokenized:
            text.add(document)
        made, where = self.builder.build(name, text), {place: new for new, place in enumerate(some)}
        tags = {tag: tuple(where[place] for place in places if place in where) for tag, places in segment.tags.items()}
        shared = tuple(self._texts.overlapping(tokenized))
        tags = {tag: found for tag, found in tags.items() if found}
        return replace(made, tags=tags, overlapping=shared, unseen=tuple(where[at] for at in some if at in unseen))

    def _mend(self) -> Change:
        """Make added segments with damaged files anew from their text; one whose text is damaged is lost."""
        segments, added, removed = list[SegmentRecord](), list[str](), 0
        for number, segment in enumerate(self.now.segments):
            if not segment.is_added or self._is_whole(segment):
                segments.append(segment)
                continue
            stream = self._text_left(segment)
            removed += segment.live
            if stream is not None:
                some, unseen = _live(segment), set(segment.unseen)
                segments.append(self._again(f"{ADDED}/{self.number:04d}.{number}", segment, stream, some, unseen))
                added += [stream.names[place] for place in some]
        if not any(segment.live for segment in segments):
            raise ArtifactError(f"no text of {self._run.root} is whole; put back a copy of it, or build another run")
        if tuple(segments) != self.now.segments:
            self.commit(segments, len(added), removed)
            remove_unreferenced(self._run.root, self.now)
        return self.done(tuple(added), ())

    def _verify(self, segment: SegmentRecord, kinds: Iterable[str]) -> None:
        """Hash every byte of some parts of a segment."""
        snapshot = self.snapshot
        for kind in kinds:
            snapshot.part(segment, kind).verify(trust=False)

    def _is_whole(self, segment: SegmentRecord) -> bool:
        try:
            self._verify(segment, segment.parts)
        except VersionError:
            raise
        except ArtifactError:
            return False
        return True

    def _text_left(self, segment: SegmentRecord) -> Stream | None:
        """Return the text of an added segment; None, with a warning, if it is damaged."""
        try:
            self._verify(segment, [TEXT])
        except VersionError:
            raise
        except ArtifactError as error:
            what = str(error).partition(";")[0]
            warn(f"the text of {segment.live} documents is lost ({what}); gnnlm documents lists those that are left")
            return None
        return text_of(self.snapshot, segment)

    def _tags_by_name(self) -> dict[str, set[str]]:
        """Return the tags of the generation's documents whose texts are still there."""
        found: dict[str, set[str]] = {}
        for segment in self.now.segments:
            with suppress(ArtifactError):  # a segment of a corpus that was rebuilt
                names = text_of(self.snapshot, segment).names
                for tag, places in segment.tags.items():
                    for place in places:
                        found.setdefault(names[place], set()).add(tag)
        return found


def _live(segment: SegmentRecord) -> list[int]:
    """Return the documents of a segment that are not removed."""
    return [place for place in range(segment.documents) if place not in set(segment.removed)]


def checked_tags(tags: Iterable[str]) -> set[str]:
    """Check tags; a filter must be able to name them."""
    wanted = {tags} if isinstance(tags, str) else set(tags)
    for tag in wanted:
        if not isinstance(tag, str) or not tag or tag != tag.strip() or any(sign in tag for sign in "*?[\n\0"):
            raise ConfigError(
                f"expected a tag such as manual, without spaces at its ends or the signs * ? [ (got {tag!r})"
            )
    return wanted
