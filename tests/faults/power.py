"""A disk that loses power: what it holds afterwards is what was synced, and whatever else it happened to have written.

`Power` follows the changes in a folder as `gnnlm.artifact.disk` tells of them. A file is sure to hold what it held when
it was last synced; a directory is sure to hold the names that it had when it was last synced. Of what came later, any
directory may be at any point since, and the bytes of any file may be old, new, missing or zero.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Literal

Names = dict[str, int]  # name in a directory -> inode
Mode = Literal["nothing", "names", "data", "any"]
MODES: tuple[Mode, ...] = ("nothing", "names", "data", "any")


class Power:
    """Which names and bytes below a folder are sure to be there after a power failure."""

    def __init__(self, root: Path) -> None:
        """Everything that is there now is on the disk."""
        self.root = root
        self._names: dict[int, list[Names]] = {}  # of a directory: when it was synced, and after each change since
        self._data: dict[int, bytes] = {}  # of a file, when it was last synced
        self._open: dict[int, int] = {}  # a descriptor of each inode: so its number is not used again
        for folder, _, files in os.walk(root):
            self._sync_names(Path(folder))
            for name in files:
                self._sync_data(Path(folder, name))

    def about_to(self, change: str, path: Path) -> None:
        """Take note of what lies below the folder before a change; a sync is taken as done."""
        if not path.is_relative_to(self.root):
            return
        for folder in {path.parent, path}:
            if folder.is_dir() and folder.is_relative_to(self.root):
                seen = self._names.setdefault(self._number(folder), [{}])
                if (now := self._scan(folder)) != seen[-1]:
                    seen.append(now)
        if change == "sync":
            self._sync_data(path)
        elif change == "sync directory":
            self._sync_names(path)

    def cut(self, mode: Mode, chance: random.Random) -> None:
        """Leave the folder as a power failure might: with nothing that was not synced, with all names, or all data."""
        beside = self.root.with_name(f"{self.root.name}.after")
        beside.mkdir()
        self._restore(self._number(self.root), self.root, beside, mode, chance)
        shutil.rmtree(self.root)
        beside.rename(self.root)

    def _restore(self, number: int, there: Path | None, place: Path, mode: Mode, chance: random.Random) -> None:
        """Fill a directory with what is left of the directory with this inode."""
        seen = self._names.get(number, [{}])
        if mode == "names" and there is not None and there.is_dir():
            names = self._scan(there)
        else:
            names = chance.choice(seen) if mode == "any" else seen[-1] if mode == "names" else seen[0]
        for name, inode in names.items():
            current = None if there is None else there / name
            if os.path.isdir(f"/proc/self/fd/{self._open[inode]}"):
                (place / name).mkdir()
                self._restore(inode, current, place / name, mode, chance)
            else:
                (place / name).write_bytes(self._bytes(inode, mode, chance))

    def _bytes(self, inode: int, mode: Mode, chance: random.Random) -> bytes:
        now = Path(f"/proc/self/fd/{self._open[inode]}").read_bytes()
        synced = self._data.get(inode, b"")
        zeros = synced + bytes(max(0, len(now) - len(synced)))  # its length was written, its bytes were not
        if mode == "data":
            return now
        return chance.choice([synced, zeros, now] if mode == "any" else [synced, zeros])

    def _sync_data(self, path: Path) -> None:
        self._data[self._number(path)] = path.read_bytes()

    def _sync_names(self, folder: Path) -> None:
        self._names[self._number(folder)] = [self._scan(folder)]

    def _scan(self, folder: Path) -> Names:
        return {entry.name: self._number(Path(entry.path)) for entry in os.scandir(folder)}

    def _number(self, path: Path) -> int:
        """The inode of a file or directory, which is held from now on."""
        inode = os.lstat(path).st_ino
        if inode not in self._open:
            self._open[inode] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        return inode
