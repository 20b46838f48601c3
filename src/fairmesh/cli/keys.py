"""`fairmesh keys`: everything that an experiment file may say."""

from typing import Annotated

import typer

_HEAD = """# Keys of experiment files

`fairmesh keys > docs/reference/keys.md` writes this page from the classes themselves. `fairmesh keys table` prints what
one name means, and `fairmesh keys algorithm` all members of a section.

A key that holds a class takes its name, or a table with the name and further keys:

```toml
topology = "ring"

[algorithm]
name = "ad-gda"
primal_step = { name = "geometric", start = 1.0, ratio = 0.998 }
```

`name = "import"` with `path = "mine.py:MyClass"` names a class of your own ([extending.md](../howto/extending.md)). A
key that is "left out" by default has no value: where a text says None, leave the key out. Every key can be set on the
command line: `fairmesh run FILE --set algorithm.primal_step=0.1`.
"""


def page() -> str:
    """Returns docs/reference/keys.md."""
    from fairmesh.config.reference import text_of_file
    from fairmesh.experiment import Experiment

    return f"{_HEAD}\n{text_of_file(Experiment)}"


def keys(
    name: Annotated[
        str, typer.Argument(metavar="[name]", help="A section such as algorithm, or a name such as ad-gda.")
    ] = "",
) -> None:
    """Explain the keys of experiment files.

    Prints every key with its type, its default and what it does, or those of one section or class."""
    from fairmesh.config.reference import found_by
    from fairmesh.experiment import Experiment

    print("\n".join(found_by(Experiment, name)) if name else page(), end="")
