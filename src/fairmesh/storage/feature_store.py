"""Tensors of many rows on disk, written portion by portion. Checksums tell what is whole, also after a crash."""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fairmesh.errors import BadInput
from fairmesh.storage.files import private_folder, write_atomically

FORMAT = 1
_ABOUT, _PORTIONS = "about.json", "portions.json"
_LARGEST, _MOST_ROWS = 32 << 20, 1024  # bytes and rows of a portion, at most


class Form(NamedTuple):
    """Shape and dtype of one row of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredRows:
    """A folder with tensors of the same number of rows, one file each.

    Rows are written in portions. A portion counts once its checksum is on disk, which is written after it. What a crash
    leaves half-written, and what the disk has damaged since, is not whole, and is written again.

    Args:
        folder: The folder. It is made if it is not there.
        forms: Of each tensor.
        rows: How many rows.
        batch: How many rows are computed together; a portion holds a multiple of it.
        report: Told in words if what was there cannot be used. Default: nothing.
    """

    def __init__(
        self,
        folder: Path,
        forms: Sequence[Form],
        rows: int,
        batch: int,
        report: Callable[[str], None] = lambda text: None,
    ):
        self.folder, self._forms, self._rows, self._report = folder, list(forms), rows, report
        per_row = max(1, sum(form.nbytes for form in forms))
        self._each = batch * max(1, min(_MOST_ROWS, _LARGEST // per_row) // batch)
        self._about = {
            "format": FORMAT,
            "rows": rows,
            "portion": self._each,
            "tensors": [[list(form.shape), str(form.dtype)] for form in forms],
        }

    @property
    def nbytes(self) -> int:
        """How many bytes all rows take."""
        return self._rows * sum(form.nbytes for form in self._forms)

    @property
    def count(self) -> int:
        """How many portions there are."""
        return -(-self._rows // self._each)

    def place(self, portion: int) -> slice:
        """Returns the rows of a portion."""
        return slice(portion * self._each, min(self._rows, (portion + 1) * self._each))

    def known(self) -> int:
        """Returns how many rows were written, without reading them."""
        written = [int(portion) for portion in self._checksums()] if self._is_mine() else []
        return sum(self.place(portion).stop - self.place(portion).start for portion in written)

    @contextmanager
    def locked(self, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Keeps other processes from writing the same rows meanwhile. Calls `waiting` if another one does so now."""
        private_folder(self.folder)
        with open(self.folder / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:  # also if processes that were forked meanwhile, to read data, still hold the file
                fcntl.flock(file, fcntl.LOCK_UN)

    def missing(self) -> list[int]:
        """Returns the portions that are not whole, after reading all others and comparing their checksums."""
        if not self._is_mine():
            if (self.folder / _ABOUT).exists():
                self._report(f"what is in {self.folder} is damaged or of another version, and computed again")
            self.clear()
            return list(range(self.count))
        known = self._checksums()
        whole = [portion for portion in range(self.count) if known.get(str(portion)) == self._checksum(portion)]
        if damaged := len(known) - len(whole):
            self._report(f"{damaged} of {len(known)} stored portions in {self.folder} are damaged, and computed again")
            self._write_checksums({str(portion): known[str(portion)] for portion in whole})
        return sorted(set(range(self.count)) - set(whole))

    def clear(self) -> None:
        """Starts over: no portion counts as whole, and the disk has room for all rows.

        Raises:
            BadInput: There is not enough room.
        """
        (self.folder / _PORTIONS).unlink(missing_ok=True)
        with self._storing():
            for k, form in enumerate(self._forms):
                with open(self._file(k), "wb") as file:
                    if form.nbytes:
                        os.posix_fallocate(file.fileno(), 0, self._rows * form.nbytes)
        write_atomically(self.folder / _ABOUT, json.dumps(self._about).encode())

    def write(self, portion: int, tensors: Sequence[Tensor]) -> None:
        """Writes a portion. It is on disk when this returns."""
        rows = self.place(portion)
        with self._storing():
            for k, (form, tensor) in enumerate(zip(self._forms, tensors)):
                with open(self._file(k), "r+b") as file:
                    file.seek(rows.start * form.nbytes)
                    file.write(_bytes_of(tensor.to(form.dtype)))
                    file.flush()
                    os.fsync(file.fileno())
        self._write_checksums(self._checksums() | {str(portion): self._checksum(portion)})

    def tensors(self) -> list[Tensor]:
        """Returns all tensors (rows, ...), mapped into memory: the disk is read where they are."""
        made = []
        for k, form in enumerate(self._forms):
            size = self._rows * math.prod(form.shape)
            # Shared, since private mappings count as memory that the process takes.
            flat = torch.from_file(str(self._file(k)), shared=True, size=size, dtype=form.dtype) if size else None
            made.append((torch.empty(0, dtype=form.dtype) if flat is None else flat).reshape(self._rows, *form.shape))
        return made

    def _file(self, k: int) -> Path:
        return self.folder / f"tensor-{k}.bin"

    def _is_mine(self) -> bool:
        """Returns whether the folder holds such tensors, as far as their sizes tell."""
        try:
            sizes = [self._file(k).stat().st_size for k in range(len(self._forms))]
            about = json.loads((self.folder / _ABOUT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return about == self._about and sizes == [self._rows * form.nbytes for form in self._forms]

    def _checksums(self) -> dict[str, str]:
        try:
            found = json.loads((self.folder / _PORTIONS).read_text(encoding="utf-8"))
            return {str(key): str(value) for key, value in found.items() if 0 <= int(key) < self.count}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write_checksums(self, known: dict[str, str]) -> None:
        write_atomically(self.folder / _PORTIONS, json.dumps(known).encode())

    def _checksum(self, portion: int) -> str:
        """Returns the checksum of a portion as the disk has it."""
        rows, hasher = self.place(portion), hashlib.sha256()
        for k, form in enumerate(self._forms):
            with open(self._file(k), "rb") as file:
                file.seek(rows.start * form.nbytes)
                hasher.update(file.read((rows.stop - rows.start) * form.nbytes))
        return hasher.hexdigest()

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BadInput(
                f"cannot write {self.folder}, which needs {in_bytes(self.nbytes)}: {error.strerror or error}; free "
                "some space, or use another disk"
            ) from error


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def refuse_full_disk(folder: Path, needed: int, what: str) -> None:
    """Raises BadInput if the disk of a folder, which need not exist, has less room than is needed."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise BadInput(
            f"{what} take {in_bytes(needed)} in {folder}, where {in_bytes(free)} are free; free some space, or use "
            'another disk, or dtype = "bfloat16", which takes half of it'
        )


def in_bytes(count: int) -> str:
    """Returns a size in words."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
