"""Tries a built release as a user would: installed from its wheel into an empty environment, away from the checkout.

    make dist
    python tests/release/try_release.py dist --python python3.12 --python python3.13

It needs no package but the standard library, and an index for `pip` that has fairmesh's dependencies.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """
rounds = 20
data = { name = "digits", nodes = 4 }
options = { measure_every = 10, compare_weights = false }
"""
NAMES = """
import sys
import fairmesh as fm
assert not {"torch", "numpy", "matplotlib"} & set(sys.modules), "import fairmesh is not light"
found = 0
for name in fm.__all__:
    thing = getattr(fm, name)
    for inner in getattr(thing, "__all__", []) if type(thing).__name__ == "module" else []:
        getattr(thing, inner)
        found += 1
    found += 1
print(fm.__version__, fm.__file__, found)
"""


class Failed(Exception):
    """A step did not do what it should."""


def check(condition: bool, what: str) -> None:
    if not condition:
        raise Failed(what)


class Trial:
    """An empty environment of one interpreter, and a folder that has nothing to do with the checkout."""

    def __init__(self, python: str, wheel: Path, sdist: Path, env: Path, folder: Path):
        self.python, self.wheel, self.sdist, self.env, self.folder = python, wheel, sdist, env, folder
        self.version = wheel.name.split("-")[1]

    def call(self, *command: str, code: int = 0) -> str:
        """Returns what a command of the environment printed."""
        first, *rest = command
        path = self.env / "bin" / first
        done = subprocess.run([path, *rest], cwd=self.folder, capture_output=True, text=True, timeout=1800)
        check(done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def pip(self, *arguments: str) -> str:
        return self.call("python", "-m", "pip", "--disable-pip-version-check", *arguments)

    # The steps, in their order

    def install(self) -> None:
        """the wheel is installed into an empty environment, and all it needs is there"""
        if not (self.env / "bin" / "python").exists():
            subprocess.run([self.python, "-m", "venv", self.env], check=True)
        self.pip("install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(self.wheel))
        self.pip("install", "--quiet", "--force-reinstall", "--no-deps", str(self.wheel))  # if the environment was used
        self.pip("check")

    def public_names(self) -> None:
        """every public name can be imported, without extras, and importing fairmesh imports no torch"""
        version, path, found = self.call("python", "-W", "error::SyntaxWarning", "-c", NAMES).split()
        check(version == self.version, f"fairmesh.__version__ is {version}, the wheel's {self.version}")
        check(Path(path).is_relative_to(self.env), f"{path} is not in the environment")
        check(int(found) > 100, f"only {found} public names")

    def run(self) -> None:
        """an experiment file is trained, resumed and read again"""
        (self.folder / "digits.toml").write_text(EXPERIMENT)
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        said = json.loads(self.call("fairmesh", "run", "digits.toml", "--json"))
        check(0.3 < said["worst"] <= 1, f"accuracy of the worst site: {said['worst']}")
        self.call("fairmesh", "run", "digits.toml", "--resume", "--json")

    def extras_that_are_missing(self) -> None:
        """what needs an extra names it"""
        said = self.call("fairmesh", "run", "digits.toml", "--out", "tracked", "--track", "wandb", code=2)
        check("pip install 'fairmesh[wandb]'" in said, said)

    def demo(self) -> None:
        """the demo runs with the core alone"""
        shutil.rmtree(self.folder / "demo", ignore_errors=True)
        said = json.loads(self.call("fairmesh", "demo", "--out", "demo", "--json"))
        check(Path(self.folder / said["folder"]).is_dir(), "the demo left no folder")

    def plots(self) -> None:
        """with the extra plot, the README's example draws its curves, and a report has pictures"""
        self.pip("install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{self.wheel}[plot]")
        examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
        (self.folder / "readme.py").write_text(examples[0])
        self.call("python", "readme.py")
        drawn = [path for path in self.folder.glob("*.png") if path.stat().st_size > 10_000]
        check(bool(drawn), "the README's example drew nothing")
        self.call("fairmesh", "report", "runs/digits")
        check("<svg" in (self.folder / "runs/digits/report.html").read_text(), "the report has no picture")

    def sdist_gives_the_wheel(self) -> None:
        """a wheel that is built from the sdist has the same files"""
        self.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", "from-sdist", str(self.sdist))
        (built,) = (self.folder / "from-sdist").glob("*.whl")
        ours, theirs = (
            {(one.filename, one.CRC) for one in zipfile.ZipFile(path).infolist()} for path in (self.wheel, built)
        )
        differ = sorted({name for name, _ in ours ^ theirs} - {name for name, _ in ours if name.endswith("/RECORD")})
        check(not differ, f"these files differ: {differ}")


def contents(wheel: Path, sdist: Path) -> None:
    """the wheel has the library, its licences and its types, and nothing else"""
    names = zipfile.ZipFile(wheel).namelist()
    others = [name for name in names if not re.match(r"fairmesh(/|-[^/]*\.dist-info/)", name)]
    check(not others, f"the wheel has {others[:5]}")
    for needed in ("fairmesh/py.typed", "LICENSE", "digits.md", "digits.npz"):
        check(any(name.endswith(needed) for name in names), f"the wheel has no {needed}")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests/conftest.py", "constraints.txt"):
        check(needed in inside, f"the sdist has no {needed}")


@contextmanager
def told(python: str, what: str | None) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except Failed as error:
        print(f"FAILED  {python}: {what}\n{error}", flush=True)
        raise SystemExit(1) from None
    print(f"ok {time.monotonic() - started:5.0f} s  {python}: {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder with one wheel and one sdist")
    parser.add_argument("--python", action="append", default=[], help="an interpreter; may be repeated")
    parser.add_argument("--keep", type=Path, help="a folder for the environments, to use them again")
    given = parser.parse_args()
    (wheel,), (sdist,) = given.dist.resolve().glob("*.whl"), given.dist.resolve().glob("*.tar.gz")
    with told("any", contents.__doc__):
        contents(wheel, sdist)
    for python in given.python or [sys.executable]:
        version = subprocess.run(
            [python, "-c", "import platform; print(platform.python_version())"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        with tempfile.TemporaryDirectory() as temporary:
            env = (given.keep.resolve() if given.keep else Path(temporary)) / f"env-{version}"
            folder = Path(temporary) / "elsewhere"
            folder.mkdir()
            trial = Trial(python, wheel, sdist, env, folder)
            steps: list[Callable[[], None]] = [
                trial.install, trial.public_names, trial.run, trial.extras_that_are_missing, trial.demo, trial.plots,
                trial.sdist_gives_the_wheel,
            ]  # fmt: skip
            for step in steps:
                with told(f"Python {version}", step.__doc__):
                    step()


if __name__ == "__main__":
    main()
