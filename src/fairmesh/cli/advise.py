"""`fairmesh advise`: what to use for a problem, and what a run will take."""

from pathlib import Path
from typing import Annotated

import typer

from fairmesh.cli.run import use_data
from fairmesh.cli.terminal import Json, print_json, readable_toml, say, show_table
from fairmesh.errors import BadInput


def advise(
    experiment: Annotated[
        Path, typer.Argument(help="An experiment file (TOML); it needs no [algorithm].", callback=readable_toml)
    ],
    set_: Annotated[
        list[str], typer.Option("--set", help="key=value, e.g. topology.name=complete; may be repeated.")
    ] = [],  # noqa: B006
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the datasets, instead of $FAIRMESH_DATA.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Also write the file with the recommended settings here, next to the first.")
    ] = None,
    rtt: Annotated[
        float | None, typer.Option(help="The longest round trip between two sites, in ms: adds the time between sites.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="The bandwidth of the slowest site's line, in Mbit/s; needs --rtt.")
    ] = None,
    json_: Json = False,
) -> None:
    """Recommend algorithm, compressor, consensus step and rounds for the problem in a TOML file.

    Looks at its data, model and graph, trains a few rounds, and predicts time, memory and traffic. With --rtt it also
    says how long the run takes between sites, and recommends local steps where sites would mostly wait. With [privacy]
    it says what each epsilon costs and promises at these sites, and rehearses nothing."""
    from fairmesh.advice import advise as advice_for
    from fairmesh.experiment import load_experiment

    if write and write.exists():
        raise BadInput(f"--write {write}: there is such a file already; name another")
    if write and write.resolve().parent != experiment.resolve().parent:
        raise BadInput(f"--write {write}: name a file next to {experiment}, since paths in it start at its folder")
    if bandwidth is not None and rtt is None:
        raise BadInput("--bandwidth needs --rtt, the round trip in ms; `fairmesh mesh check` measures both")
    use_data(data)
    assignments = [*set_, *([f"options.device={device}"] if device else [])]
    line = {"rtt_ms": rtt, "bandwidth_mbits": bandwidth}
    given = {name: value for name, value in line.items() if value is not None}
    advice = advice_for(load_experiment(experiment, assignments), None if json_ else say, **given)
    if write:
        _write(write, experiment, set_, advice.settings())
    if json_:
        print_json(advice.as_json() | ({"written": str(write)} if write else {}))
        return
    show_table([["problem", ""], *([name.replace("_", " "), value] for name, value in advice.facts_in_words())])
    show_table([["setting", "recommended", "why"], *map(list, advice.recommended)], texts=True)
    show_table([["a run takes", "about"], *map(list, advice.predicted_in_words())], texts=True)
    if advice.privacy:
        show_table(advice.privacy.table(), title="privacy: what each epsilon means")
    for hint in (*(advice.privacy.sentences() if advice.privacy else ()), *advice.hints):
        say(hint)
    flags = "".join(f" --{name.partition('_')[0]} {value:g}" for name, value in given.items())
    say(f"written: {write}; fairmesh run {write}" if write else advice.next_step(experiment, flags))


_FIRST_LINES = """\
# {source} with the settings that `fairmesh advise` recommends.
# What is not written here keeps its default. Without [algorithm] that is Tracked AD-GDA with its default steps and
# compressor; `fairmesh keys tracked-ad-gda` lists them.

"""


def _write(path: Path, source: Path, assignments: list[str], settings: dict) -> None:
    """Writes the experiment file with the recommended settings."""
    import tomli_w

    from fairmesh.config.overrides import overridden, read_toml
    from fairmesh.storage.files import write_atomically

    table = overridden(read_toml(source), assignments)
    for name in ("algorithm", "sweep", "objective"):
        table.pop(name, None)
    content = tomli_w.dumps(table | settings)
    write_atomically(path, (_FIRST_LINES.format(source=source.name) + content).encode())
