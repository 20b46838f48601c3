"""The console script, called as a shell would."""

import sys

import pytest

from fairmesh.cli.main import main


@pytest.fixture
def called(monkeypatch, capsys):
    """Calls `fairmesh` with arguments and returns its exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fairmesh", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call
