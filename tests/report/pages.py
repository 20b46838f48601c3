"""Reads a page of a report as its structure: elements, tables, and texts."""

from html.parser import HTMLParser

_ALONE = {"meta", "br", "link"}  # elements of HTML without an end


class Page(HTMLParser):
    """A parsed page. It refuses elements that are not closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: list[list[list[str]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        if tag not in _ALONE:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        for tag in dict.fromkeys(self._open):
            self.texts[tag][-1] += data
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """Returns the attributes of each element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]
