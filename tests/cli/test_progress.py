import io

import pytest
from rich.console import Console

from fairmesh.cli.progress import _live_bars
from fairmesh.metrics.units import Unit


@pytest.mark.parametrize("width", [62, 80, 104, 105, 160])
def test_live_bars_show_whole_numbers_on_every_screen(width):
    written = io.StringIO()
    screen = Console(file=written, width=width, force_terminal=True, color_system=None)
    bars = _live_bars(screen)
    status = Unit("accuracy", share=True).progress([{"accuracy": {"worst": 0.795, "mean": 0.9}}])
    task = bars.add_task("first", total=1200, status=status)
    bars.update(task, completed=1150)
    screen.print(bars.get_renderable())
    line = written.getvalue()
    assert len(line.splitlines()) == 1
    assert "1150/1200" in line
    assert status in line
    assert "…" not in line
    assert ("rounds" in line) == (width >= 105)


def test_live_bars_leave_room_for_a_long_name_and_a_loss_on_80_columns():
    written = io.StringIO()
    screen = Console(file=written, width=80, force_terminal=True, color_system=None)
    bars = _live_bars(screen)
    status = Unit("loss", share=False).progress([{"loss": {"worst": 0.12345, "mean": 0.02346}}])
    bars.add_task("fairmesh's default", total=400, status=status)
    screen.print(bars.get_renderable())
    assert "…" not in written.getvalue()
