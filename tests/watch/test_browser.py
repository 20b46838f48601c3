"""The page in a real browser, of scripted views."""

import re
import threading
import time
from dataclasses import replace

import pytest

from fairmesh.report import charts
from fairmesh.report.elements import figure, folded, pictures, table
from fairmesh.report.html import STYLE
from fairmesh.watch import server as module
from fairmesh.watch.page import rendered, snapshot
from fairmesh.watch.server import serving
from fairmesh.watch.view import Edge, Line
from tests.watch.browser import Pages, chromium
from tests.watch.examples import HOSTILE, VIEWS, node, private, simulation, sixty

PHONE, WALL = {"width": 390, "height": 844}, {"width": 1920, "height": 1080}


class Scripted:
    """A source that shows what a test says."""

    def __init__(self, view):
        self.now = view

    def view(self, wait=False):
        return self.now


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def pages(browser, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_S", 0.05)
    opened = Pages(browser)
    yield opened
    opened.close()
    elsewhere = [url for url in opened.requests if not url.startswith(("http://127.0.0.1:", "data:", "file:"))]
    assert not elsewhere
    assert not opened.faults


def sentence(page):
    return page.inner_text("#now")


def says(page, text, where="#now"):
    """Waits until a part of the page has a text."""
    page.wait_for_function(
        "([where, text]) => document.querySelector(where).innerText.includes(text)", arg=[where, text]
    )


def test_page_follows_a_node_live_and_leaves_alone_what_a_reader_does(pages):
    source = Scripted(sixty())
    with serving(source) as server:
        page = pages.open(server.address)
        assert "Round 300 of 1,000" in sentence(page)
        assert page.locator("#answers dt").count() == 5
        page.locator("#sites summary").click()
        page.locator("#sites summary").focus()
        page.evaluate("scrollTo(0, 400)")
        where = "document.activeElement.getBoundingClientRect().top"
        before = page.evaluate(where)
        source.now = replace(sixty(), sentence="round 301 of 1,000", log=(Line("2030-03-17T17:36:00Z", "info", "new"),))
        says(page, "Round 301 of 1,000")
        says(page, "new", "#log")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert page.locator("#sites details").get_attribute("open") is not None
        assert abs(page.evaluate(where) - before) < 2  # although the sentence above has fewer lines now
        assert HOSTILE in page.inner_text("#sites")
        assert page.locator("img").count() == 0


class Failing(Scripted):
    def view(self, wait=False):
        if self.now is None:
            raise OSError("the disk is gone")
        return self.now


def test_page_says_that_a_reading_has_failed_and_how_old_is_what_it_shows(pages):
    source = Failing(node())
    with serving(source) as server:
        page = pages.open(server.address)
        assert not page.is_visible("#lost")
        source.now = None
        says(page, "the disk is gone", "#lost")
        says(page, "read ", "#age")
        source.now = node()
        page.wait_for_selector("#lost", state="hidden")


@pytest.mark.slow
def test_selection_stays_while_news_come(pages):
    source = Scripted(node())
    with serving(source) as server:
        page = pages.open(server.address)
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#sites tbody tr:nth-child(3) th'))")
        chosen = page.evaluate("String(getSelection())")
        assert "north" in chosen
        source.now = replace(node(), round=1210, order=(0, 1, 2, 3, 4), sentence="another order")
        says(page, "nother order")
        assert page.evaluate("String(getSelection())") == chosen
        assert page.locator("#sites tbody tr").nth(1).inner_text().startswith("north")


@pytest.mark.slow
def test_keyboard_reaches_everything_and_shows_where_it_is(pages):
    with serving(Scripted(sixty())) as server:
        page = pages.open(server.address)
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            what = page.evaluate(
                "[document.activeElement.tagName, document.activeElement.className, "
                "getComputedStyle(document.activeElement).outlineStyle]"
            )
            if what[0] == "BODY":
                break
            assert what[2] != "none", what
            reached.append(what[0])
            if what[0] == "SUMMARY":
                page.keyboard.press("Enter")
        else:
            raise AssertionError("the keyboard is caught")
        assert {"A", "DIV", "SUMMARY"} <= set(reached)
        assert page.locator("#sites details").first.get_attribute("open") is not None
        page.locator("#contents a").last.focus()
        page.keyboard.press("Enter")
        assert page.evaluate("scrollY") > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_page_fits_a_phone_without_scrolling_sideways(pages, name):
    with serving(Scripted(VIEWS[name]())) as server:
        page = pages.open(server.address, viewport=PHONE)
        for part in page.locator("summary").all():
            part.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('main :not(svg *)')].filter(e => e.innerText?.trim())"
            ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert smallest >= 10


def test_cells_of_sites_are_all_seen_on_a_phone_and_rows_and_charts_are_whole_on_paper(pages, tmp_path):
    sites = tuple(replace(site, alone=site.value, fixed=site.value, uses="adapted") for site in private().sites)
    names, dots = [f"site {k}" for k in range(60)], charts.Dots("this run", range(60))
    rows = [["site", "accuracy", "alone\nremark", *map(str, range(9))], *([name, *["71.0"] * 11] for name in names[:3])]
    shown = table(rows, {0}, compact=True, cards=True) + folded("The same", "in words", again=True)
    shown += pictures([figure(charts.dots(names, [dots], "accuracy", "sites"), "sites")])
    texts = snapshot(replace(private(), sites=sites)), f"<style>{STYLE}</style>{shown}"
    for name, text in zip(("page", "report"), texts):
        (tmp_path / name).with_suffix(".html").write_text(text, encoding="utf-8")
        page = pages.open((tmp_path / f"{name}.html").as_uri(), viewport=PHONE)
        ends = "[...document.querySelectorAll('.cards td')].map(e => e.getBoundingClientRect().right)"
        assert 0 < max(page.evaluate(ends)) <= PHONE["width"]
        page.set_viewport_size({"width": 680, "height": 1000})  # of A4 within its margins
        page.emulate_media(media="print")
        heights = page.evaluate("[...document.querySelectorAll('figure')].map(e => e.getBoundingClientRect().height)")
        assert max(heights) < 267 / 25.4 * 96  # of A4 within its margins
        assert page.evaluate("getComputedStyle(document.querySelector('tr.low>*')).printColorAdjust") == "exact"
    assert not page.get_by_text("in words").is_visible()


@pytest.mark.slow
def test_sentence_can_be_read_across_a_room_and_the_answers_need_no_scrolling(pages):
    for view in (simulation(), node(), sixty()):
        with serving(Scripted(view)) as server:
            page = pages.open(server.address, viewport=WALL)
            assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('h1')).fontSize)") >= 48
            assert page.evaluate("document.querySelector('#answers').getBoundingClientRect().bottom") < WALL["height"]


def contrasts(page):
    """Returns the contrast to its background of every text outside pictures."""
    return page.evaluate(
        """() => {
      const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((c) => c / 255)
        const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
      }
      const under = (e) => {
        for (; e; e = e.parentElement) {
          const colour = getComputedStyle(e).backgroundColor
          if (!/, 0\\)$/.test(colour)) return colour
        }
        return "rgb(255, 255, 255)"
      }
      return [...document.querySelectorAll("body *:not(svg *):not(script):not(progress)")]
        .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.nodeValue.trim()) && e.checkVisibility())
        .map((e) => {
          const [a, b] = [light(getComputedStyle(e).color), light(under(e))].sort((x, y) => y - x)
          return [e.tagName + "." + e.className, (a + 0.05) / (b + 0.05)]
        })
    }"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_can_be_read_by_day_and_by_night(pages, scheme):
    with serving(Scripted(node())) as server:
        page = pages.open(server.address, color_scheme=scheme)
        red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
        assert red > 200 if scheme == "light" else red < 60
        found = contrasts(page)
        assert len(found) > 50
        assert not [one for one in found if one[1] < 4.5]


@pytest.mark.slow
def test_page_prints_with_all_rows_and_without_what_only_a_screen_can_do(pages):
    with serving(Scripted(sixty())) as server:
        page = pages.open(server.address, color_scheme="dark")
        pdf = page.pdf(format="A4")
        assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12
        page.emulate_media(media="print")
        assert not page.locator("#contents").is_visible()
        assert page.locator("#sites tbody tr").last.is_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_two_hundred_sites_are_drawn_in_a_moment(pages):
    run = simulation()
    sites = tuple(replace(run.sites[k % 4], name=f"site-{k}") for k in range(200))
    curves = replace(run.curves, sites=tuple(run.curves.sites[k % 4] for k in range(200)))
    edges = tuple(Edge((k, (k + step) % 200)) for k in range(200) for step in (1, 7))
    source = Scripted(replace(run, sites=sites, curves=curves, edges=edges, order=tuple(range(200))))
    with serving(source) as server:
        page = pages.open(server.address)
        assert page.locator("#sites tbody tr").count() == 200
        source.now = replace(source.now, sentence="moved on", sites=tuple(replace(s, round=1841) for s in sites))
        says(page, "oved on")
        took = page.evaluate(
            """() => { const html = document.querySelector("#sites").innerHTML, began = performance.now()
            for (let k = 0; k < 10; k++) new DOMParser().parseFromString(html, "text/html")
            return (performance.now() - began) / 10 }"""
        )
        assert took < 200
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


@pytest.mark.slow
def test_a_site_that_dies_is_shown_as_that_until_it_returns(pages):
    fine = replace(
        node(), sites=tuple(replace(s, state="at work", heard_s_ago=2.0) for s in node().sites), waits=(), chain=()
    )
    source = Scripted(replace(fine, urgency="fine", sentence="round 1,203 of 4,000"))
    with serving(source) as server:
        page = pages.open(server.address)
        assert page.locator(".unreachable").count() == page.locator("svg .away").count() == 0
        source.now = node()
        says(page, "east has been unreachable for 12 minutes")
        assert page.locator("#now .act").count() == 1
        assert page.locator("tr .unreachable").inner_text().endswith("unreachable")
        assert page.locator("svg.chart .away").count() == 1
        says(page, "west has waited for east for 12 minutes", "#network")
        source.now = replace(fine, urgency="fine", sentence="round 1,204 of 4,000")
        says(page, "ound 1,204 of 4,000")
        assert page.locator(".unreachable").count() == page.locator("svg .away").count() == 0


@pytest.mark.slow
def test_two_pages_show_the_same_and_closing_one_changes_nothing(pages):
    source = Scripted(simulation())
    with serving(source) as server:
        one, other = (pages.open(server.address) for _ in range(2))
        source.now = replace(simulation(), sentence="moved on")
        says(one, "oved on")
        says(other, "oved on")
        one.close()
        source.now = replace(simulation(), sentence="further")
        says(other, "urther")


def lost(page, *, shown):
    page.wait_for_function("shown => document.querySelector('#lost').hidden !== shown", arg=shown)


@pytest.mark.slow
def test_page_says_when_the_server_is_gone_and_goes_on_when_it_is_back(pages):
    source = Scripted(simulation())
    with serving(source) as server:
        port, token = server.server_port, server.token
        page = pages.open(server.address)
        lost(page, shown=False)
    lost(page, shown=True)
    assert "run itself is not touched" in page.inner_text("#lost")
    assert "1,840" in sentence(page)  # what was known stays
    source.now = replace(simulation(), sentence="back again")
    with serving(source, port, token):
        says(page, "ack again")
        lost(page, shown=False)


@pytest.mark.slow
def test_page_asks_for_news_where_no_stream_comes_through(pages, monkeypatch):
    source = Scripted(simulation())
    with serving(source) as server:
        server.streams = threading.BoundedSemaphore(1)
        server.streams.acquire()
        page = pages.open(server.address)
        source.now = replace(simulation(), sentence="moved on")
        says(page, "oved on")
        lost(page, shown=False)
    pages.faults[:] = [fault for fault in pages.faults if "503" not in fault]


@pytest.mark.slow
def test_age_of_the_news_is_counted_whatever_the_clock_of_the_browser_says(pages):
    wrong = "{ const now = Date.now; Date.now = () => now() + 3e11 }"
    source = Scripted(simulation())
    with serving(source) as server:
        page = pages.open(server.address)
        page.add_init_script(wrong)
        page.reload()
        page.wait_for_function("/^news [1-9] seconds? old$/.test(document.querySelector('#age').innerText)")
        first = int(page.inner_text("#age").split()[1])
        page.wait_for_timeout(2500)
        assert 2 <= int(page.inner_text("#age").split()[1]) - first <= 4


@pytest.mark.slow
def test_page_that_nobody_sees_asks_for_nothing_and_is_new_when_it_is_seen_again(pages):
    hide = """state => {
      Object.defineProperty(document, "hidden", { value: state, configurable: true })
      document.dispatchEvent(new Event("visibilitychange"))
    }"""
    source = Scripted(simulation())
    with serving(source) as server:
        page = pages.open(server.address)
        page.evaluate(hide, True)
        until = time.monotonic() + 10
        while server.streams._value < module.STREAMS and time.monotonic() < until:
            source.now = replace(simulation(), sentence=f"unseen {time.monotonic()}")
            page.wait_for_timeout(50)
        assert server.streams._value == module.STREAMS
        assert "nseen" not in sentence(page) or "unseen" not in sentence(page)
        source.now = replace(simulation(), sentence="seen again")
        page.evaluate(hide, False)
        says(page, "een again")


@pytest.mark.slow
def test_page_works_without_its_script(pages):
    source = Scripted(simulation())
    with serving(source) as server:
        page = pages.open(server.address, java_script_enabled=False)
        assert "1,840" in page.locator("h1").inner_text()
        source.now = replace(simulation(), sentence="moved on")
        page.wait_for_selector("h1 :text('oved on')", timeout=15_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_snapshot_asks_for_nothing(pages, tmp_path, name):
    path = tmp_path / "page.html"
    path.write_text(snapshot(VIEWS[name]()), encoding="utf-8")
    page = pages.open(f"file://{path}")
    assert (
        page.evaluate("getComputedStyle(document.querySelector('#answers dl')).display") == "grid"
    )  # its style is let in
    assert [url for url in pages.requests if not url.startswith("data:")] == [f"file://{path}"]


@pytest.mark.slow
def test_script_that_gets_into_a_page_is_not_run(pages, monkeypatch):
    """Were a word of another site not escaped, the policy would still stop it."""
    broken = "<img src=x onerror=alert(1)><script>alert(2)</script><a href='javascript:alert(3)'>x</a>"
    monkeypatch.setattr(module, "rendered", lambda view: rendered(view) | {"log": broken})
    with serving(Scripted(simulation())) as server:
        page = pages.open(server.address)
        page.locator("#log a").click()
        page.wait_for_timeout(300)
    assert pages.faults
    assert not [fault for fault in pages.faults if fault.startswith("dialog")]
    pages.faults.clear()
