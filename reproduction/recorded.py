"""Scripts with recorded rows: they write them again, or print them."""

import argparse
from pathlib import Path


def write_or_show(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that takes `--write FILE` or `--show`."""
    parser = argparse.ArgumentParser(description=description)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, help="run the cases and write their rows here")
    what.add_argument("--show", action="store_true", help="print what is recorded as tables")
    return parser
