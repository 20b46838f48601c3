"""`fairmesh migrate`: rewrites experiment files of earlier versions."""

from pathlib import Path
from typing import Annotated

import typer

from fairmesh.cli.terminal import say


def migrate(
    files: Annotated[list[Path], typer.Argument(help="Experiment files (TOML) written for an earlier version.")],
) -> None:
    """Rewrite experiment files of earlier versions.

    Replaces old keys and names with the current ones. FILE.old keeps the original."""
    from fairmesh.config.migrations import migrated_text
    from fairmesh.config.overrides import read_toml
    from fairmesh.storage.files import write_atomically

    for file in files:
        read_toml(file)  # refuses what is not TOML, by name
        before = file.read_text(encoding="utf-8")
        after, kept = migrated_text(before)
        if after == before:
            say(f"{file}: nothing to change")
            continue
        write_atomically(file.with_name(file.name + ".old"), before.encode())
        write_atomically(file, after.encode())
        say(f"{file}: rewritten" + ("" if kept else "; its comments could not be kept, see the .old file"))
