"""Writes the traces anew: `python -m tests.golden.regenerate`, in the repository's root. To be done only when the
mathematics was meant to change; say in the commit why."""

import torch

from tests import toys
from tests.golden.trace import FOLDER, file_of, traced, written


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name, algorithm in toys.ALGORITHMS.items():
        file_of(name).write_text(written(name, traced(algorithm)))
        print(file_of(name).name)


if __name__ == "__main__":
    main()
