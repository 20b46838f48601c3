"""Downloads official files from their official source and checks them against their checksums."""

import gzip
import hashlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fairmesh.data.datasets.sources import File, Source, cache_of, found, from_archive, paths_of, places
from fairmesh.errors import BadInput

Progress = Callable[[str, int, int | None], None]  # (file, bytes so far, bytes in all where known)

_BLOCK = 1 << 18
_PATIENCE = 30.0  # seconds without an answer
_TRIES = 4  # of a connection that breaks


def folder_of(source: Source, folder: str | os.PathLike | None = None) -> Path:
    """Returns the folder that holds the files. If none does and no folder is named, downloads them into the cache."""
    if place := found(source, folder):
        return place
    if folder:
        raise BadInput(f"{source.title} is not in {folder}: put {_named(source)} there, or leave the folder out")
    return fetch(source, progress=progress_lines(source.title))


def fetch(source: Source, folder: str | os.PathLike | None = None, progress: Progress | None = None) -> Path:
    """Downloads the official files that are missing or damaged into `folder`/<name>, by default the cache.

    Returns the folder that holds them. Every file is checked."""
    target = Path(folder) / source.name if folder else cache_of(source)
    progress = progress or (lambda name, done, total: None)
    try:
        target.mkdir(parents=True, exist_ok=True)
        verdicts = dict(check(source, target))
        if source.archive and verdicts != {file.name: "right" for file in source.files}:
            if verdicts.get(source.archive.name) != "right":
                _download(source.archive, target / source.archive.name, progress)
            _unpack(source, target)
        elif not source.archive:
            wrong = [
                f for f in source.files if verdicts[f.name] != "right" and (f.md5 or verdicts[f.name] == "missing")
            ]
            for file in _addressed(source, wrong):
                packed = urllib.parse.urlsplit(file.url).path.endswith(".gz")
                _download(file, target / f"{file.name}{'.gz' * packed}", progress)
                if packed:
                    (target / file.name).unlink(missing_ok=True)  # a damaged one would be read before the .gz
    except (OSError, http.client.HTTPException) as error:
        looked = ", ".join(map(str, places(source)))
        raise BadInput(
            f"cannot fetch {source.title}: {_reason(error)}. Run it again, which continues the download, or put "
            f"{_named(source)} into {target} by hand (they were looked for in {looked}); about them: {source.home}"
        ) from error
    return target


def _named(source: Source) -> str:
    return f"its {len(source.files)} files ({', '.join(file.name for file in source.files)})"


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.url} answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"no connection ({error.reason})"
    return str(error) or type(error).__name__


def _addressed(source: Source, files: list[File]) -> list[File]:
    """Returns the files with their addresses and checksums, which a Zenodo record is asked for."""
    if not source.record or not files:
        return files
    with urllib.request.urlopen(source.record, timeout=_PATIENCE) as answer:
        try:
            hits = json.load(answer)["hits"]["hits"]
            records = [{entry["key"]: entry for entry in hit.get("files", [])} for hit in hits]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"{source.record} answers something else than records: {error}") from error
    record = next((entries for entries in records if all(file.name in entries for file in files)), None)
    if record is None:
        raise OSError(f"no record at {source.record} holds {files[0].name}")
    sums = {name: str(entry.get("checksum", "")).removeprefix("md5:") for name, entry in record.items()}
    return [replace(file, md5=sums[file.name], url=record[file.name]["links"]["self"]) for file in files]


def _download(file: File, path: Path, progress: Progress) -> None:
    """Downloads a file, continuing after a broken connection. Only checked content gets the file's name."""
    part = path.with_name(f"{path.name}.part")
    for attempt in range(_TRIES):
        try:
            _receive(file, part, lambda done, total: progress(path.name, done, total))
            break
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            if attempt + 1 == _TRIES:
                raise
            time.sleep(0.2 * 2**attempt)
    packed = path.suffix == ".gz" and file.name != path.name
    verdict = _verdict(part, packed, file.md5)
    if verdict != "right":
        part.unlink()
        raise BadInput(f"{file.url} is {verdict}: it is not the official file, so it is not kept")
    part.replace(path)


def _receive(file: File, part: Path, progress: Callable[[int, int | None], None]) -> None:
    """Appends to `part` the bytes that it still lacks."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        if error.code != 416 or not have:
            raise
        return  # the server has nothing more; the checksum decides whether the file is complete
    with answer:
        goes_on = have and answer.status == 206
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if goes_on else "wb") as sink:
            while block := answer.read(_BLOCK):
                sink.write(block)
                have += len(block)
                progress(have, total)
    if total is not None and have < total:
        raise ConnectionError(f"{file.url} broke off after {have:,} of {total:,} bytes")


def _verdict(path: Path, packed: bool, expected: str) -> str:
    """Returns "right", or what is wrong with a file's unpacked content. Without a checksum any content is right."""
    try:
        with gzip.open(path) if packed else path.open("rb") as content:
            got = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return "damaged: not a whole .gz file"
    return "right" if got == (expected or got) else f"damaged: MD5 {got}, expected {expected}"


def _unpack(source: Source, target: Path) -> None:
    """Unpacks the archive's files next to it and removes the archive."""
    archive = target / source.archive.name  # type: ignore[union-attr]
    for file, content in zip(source.files, from_archive(source, archive)):
        (target / f"{file.name}.part").write_bytes(content)
        (target / f"{file.name}.part").replace(target / file.name)
    archive.unlink()


def check(source: Source, place: Path) -> Iterator[tuple[str, str]]:
    """Yields each official file in a folder with "right", or with what is wrong with it."""
    paths = paths_of(source, place)
    if source.archive and (archive := place / source.archive.name) in paths:
        yield source.archive.name, _verdict(archive, packed=False, expected=source.archive.md5)
        return
    for file, path in zip(source.files, paths):
        if not path:
            yield file.name, "missing"
        elif file.md5:
            yield file.name, _verdict(path, path.suffix == ".gz", file.md5)
        else:
            yield file.name, _layout(path)


def _layout(path: Path) -> str:
    from fairmesh.data.datasets.coos7 import opened

    try:
        with opened(path) as (data, _):
            return f"right in its layout: {len(data)} images (no checksum is known)"
    except BadInput as error:
        return f"damaged: {error}"


def progress_lines(title: str) -> Progress:
    """Returns a callback that reports the progress of a download on stderr every few seconds."""
    said = [0.0]

    def tell(name: str, done: int, total: int | None) -> None:
        if done == total or time.monotonic() - said[0] > (0.2 if sys.stderr.isatty() else 5.0):
            said[0] = time.monotonic()
            of = f" of {total / 1e6:.1f}" if total else ""
            end = "\r" if sys.stderr.isatty() and done != total else "\n"
            print(f"{title}: {name}, {done / 1e6:.1f}{of} MB", end=end, file=sys.stderr, flush=True)

    return tell
