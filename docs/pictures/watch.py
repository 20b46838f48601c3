"""Draws watch-light.png and watch-dark.png, the live page of a node and of a simulation, from the views that its tests
show. Run it in a checkout with Chromium: python docs/pictures/watch.py"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from fairmesh.watch.page import snapshot  # noqa: E402
from tests.watch.browser import launched  # noqa: E402
from tests.watch.examples import node, simulation  # noqa: E402


def main() -> None:
    """Draws both."""
    with launched() as browser, tempfile.TemporaryDirectory() as folder:
        for scheme, view, height in (("light", node(), 1040), ("dark", simulation(), 900)):
            file = Path(folder, f"{scheme}.html")
            file.write_text(snapshot(view), encoding="utf-8")
            page = browser.new_page(viewport={"width": 1440, "height": height}, color_scheme=scheme)
            page.goto(file.as_uri())
            drawn = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            drawn.quantize(200, dither=Image.Dither.NONE).save(HERE / f"watch-{scheme}.png", optimize=True)


if __name__ == "__main__":
    main()
