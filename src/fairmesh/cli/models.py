"""`fairmesh export` and `fairmesh predict`: trained models out and in use."""

import csv
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fairmesh.cli.terminal import Json, existing, print_json, say, show_table
from fairmesh.errors import BadInput, refusing

RunArgument = Annotated[
    Path, typer.Argument(help="The folder of a finished run, or of a site between organisations.", callback=existing)
]
WhichOption = Annotated[str, typer.Option(help="final, best or time-average.")]
SiteOption = Annotated[
    str | None, typer.Option(help="The site whose model is wanted, by its name; the common model by default.")
]
ReplicaOption = Annotated[int | None, typer.Option(help="The replica, from 0; that of model.safetensors by default.")]
AllowOption = Annotated[
    list[str], typer.Option("--allow", help="A module or Python file that somebody else's run may have imported.")
]
_SHOWN = 10  # rows of predictions on a terminal


def export(
    run: RunArgument,
    onnx: Annotated[bool, typer.Option("--onnx", help="For ONNX Runtime and others.")] = False,
    torch_export: Annotated[bool, typer.Option("--torch-export", help="For torch.export.load.")] = False,
    safetensors: Annotated[bool, typer.Option("--safetensors", help="The weights only.")] = False,
    peft: Annotated[bool, typer.Option("--peft", help="The LoRA adapter, as a folder that peft loads.")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="The base model's weights with the LoRA adapter merged.")
    ] = False,
    which: WhichOption = "final",
    site: SiteOption = None,
    replica: ReplicaOption = None,
    allow: AllowOption = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="The file or folder; next to the run's models by default.")] = None,
    json_: Json = False,
) -> None:
    """Write a run's model to a file that needs no fairmesh.

    The file also does the preprocessing of tables, and describes inputs and classes. Its outputs are compared with
    PyTorch's first; if they differ, no file is left."""
    from fairmesh.inference.export import ENDINGS
    from fairmesh.inference.export import export as export_model
    from fairmesh.inference.trained import finished_run, load_model

    chosen = [name for name, asked in zip(ENDINGS, (onnx, torch_export, safetensors, peft, merged)) if asked]
    if len(chosen) != 1:
        raise BadInput("say one format: --onnx, --torch-export, --safetensors, --peft or --merged")
    model = load_model(run, which, site=site, replica=replica, allow=allow)  # type: ignore[arg-type]
    owner = model.about.get("site", "")
    names = ("exported", which if which != "final" else "", owner, "" if replica is None else str(replica))
    stem = "-".join(filter(None, names))
    path = out or finished_run(run) / f"{stem.replace('/', '_')}{ENDINGS[chosen[0]]}"
    about = export_model(model, path, chosen[0])  # type: ignore[arg-type]
    if json_:
        print_json({"file": str(path), "format": chosen[0]} | about)
        return
    _say_whose(run, owner, site)
    say(f"written: {path}; its outputs are those of PyTorch (largest difference {about['largest_difference']:.1g})")
    if peft:
        say("peft.PeftModel.from_pretrained(base, FOLDER) puts it onto the base model")
    elif safetensors or merged:
        say("it holds the weights; its metadata says how to prepare inputs and which classes the outputs belong to")
    else:
        say(f"it takes {about['how']}")


def predict(
    run: RunArgument,
    data: Annotated[Path, typer.Argument(help="A .csv, .parquet or .npz file, an image, or a folder of images.")],
    which: WhichOption = "final",
    site: SiteOption = None,
    replica: ReplicaOption = None,
    allow: AllowOption = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Where to write the predictions as .csv.")] = None,
    json_: Json = False,
) -> None:
    """Apply a run's model to new data.

    Applies the preprocessing that the model was trained with. Prints one prediction per row, and metrics if the target
    is in the data."""
    from fairmesh.inference.predict import predict as predict_rows
    from fairmesh.inference.trained import load_model

    model = load_model(run, which, site=site, replica=replica, allow=allow)  # type: ignore[arg-type]
    found = predict_rows(model, data)
    table = found.table()
    if out:
        with refusing(f"cannot write {out}", OSError), open(out, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(table)
    if json_:
        rows = [dict(zip(table[0], line)) for line in table[1:]]
        bad = [{"row": found.rows[k], "reason": reason} for k, reason in sorted(found.bad.items())]
        print_json(
            {"predictions": rows, "bad_rows": bad, "notes": list(found.notes), "metrics": dict(found.metrics)}
            | ({} if out is None else {"file": str(out)})
        )
        return
    _say_whose(run, model.about.get("site", ""), site)
    for k, reason in sorted(found.bad.items()):
        say(f"no prediction for row {found.rows[k]}: {reason}")
    for note in found.notes:
        say(note)
    if out is None:
        lines = table if not sys.stdout.isatty() else table[: 1 + _SHOWN]
        show_table([[_shown(cell) for cell in line] for line in lines])
        if len(lines) < len(table):
            say(f"{len(table) - len(lines)} more rows; --out FILE writes all")
    else:
        say(f"written: {out}, {len(table) - 1} rows")
    for name, value in found.metrics.items():
        say(f"{name}: {'not defined' if value != value else f'{value:.4g}'}")


def _say_whose(run: Path, owner: str, asked: str | None) -> None:
    """Says whose model is taken, if nobody has asked for it by a site's name and sites have models of their own."""
    from fairmesh.inference.trained import finished_run
    from fairmesh.storage.run_folder import read_summary

    if asked:
        return
    if owner:
        say(f"this is the model of {owner}; its folder state/result has the common one")
    elif read_summary(finished_run(run)).get("personal"):
        say("this is the common model; --site NAME takes the model that a site should use")


def _shown(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
