"""The report of a run: the page's structure, report.json and the model card."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

import fairmesh as fm
from fairmesh.cli.report import report
from fairmesh.metrics.units import Unit
from fairmesh.report import sections
from fairmesh.report.contents import card
from fairmesh.report.html import page
from fairmesh.report.model_card import model_card
from fairmesh.report.network_picture import network
from fairmesh.report.runs import Run, ranked, rows_of
from fairmesh.report.sentences import traffic_sentence
from fairmesh.watch.finished import told_of
from fairmesh.watch.page import rendered
from fairmesh.watch.view import Estimate
from tests.refusals import missing_from, refused
from tests.report.pages import Page
from tests.watch.examples import simulation

NAMES = ["north", "south <b>$x$</b>", "east", "west"]


def _record(replica, values, losses=None, **more):
    """Returns a record of a replica with these accuracies by site."""
    found = [value for value in values if not math.isnan(value)]
    losses = losses or [1 - value for value in values]
    known = [value for value in losses if not math.isnan(value)]
    entry = lambda values, of, sign: {  # noqa: E731
        "sites": list(values),
        "worst": sign * min(sign * v for v in of),
        "mean": sum(of) / len(of),
        "best": sign * max(sign * v for v in of),
        "gap": max(of) - min(of),
    }
    return {
        "round": 10,
        "replica": replica,
        "seed": replica,
        "accuracy": entry(values, found, 1),
        "loss": entry(losses, known, -1),
        "bytes_busiest_node": 1000,
        "nominal_bits_busiest": 8000.0,
        "lambda": [1 / len(values)] * len(values),
    } | more


def _run(*rows, names=NAMES, metric="accuracy", diverged=(), variants=None, folder=None, **more):
    """Returns a run with the final accuracies of each replica by site."""
    final = [row if isinstance(row, dict) else _record(r, row) for r, row in enumerate(rows)]
    records = [record | {"round": k, "bytes_busiest_node": 100 * k} for k in (0, 5) for record in final] + final
    summary = {
        "algorithm": "tracked-ad-gda",
        "metric": metric,
        "higher_is_better": metric == "accuracy",
        "judged_on": "test",
        "rounds": 10,
        "replicas": len(final),
        "variants": variants or [{"changes": {}, "replicas": list(range(len(final)))}],
        "diverged": list(diverged),
        "nodes": len(names),
        "parameters": 12,
        "nominal_bits_busiest": 8000.0,
        "bytes_busiest_node": 1000,
        "bytes_total": 4000,
        "sites": list(names),
        "groups": list(names),
        "prior": [1 / len(names)] * len(names),
        "model": {},
        "cvar_level": 0.2,
        "final": final,
    }
    over = dict.fromkeys(("worst_share", "cvar", "std", "jain"), 0.5)
    summary["metrics"] = {
        "accuracy": over | {"share": True, "higher_is_better": True},
        **{name: over | {"share": False, "higher_is_better": False} for name in ("loss", "delay")},
    }
    return Run("run", summary | more, records, folder)


def _versus(verdict, low, high):
    return {"local": {"difference": (low + high) / 2, "interval": [low, high], "verdict": verdict}}


def _evidence(run, verdicts):
    """Returns the run with intervals and a comparison with training alone."""
    sites = [
        {"name": name, "n": 40, "value": value, "interval": [value - 0.1, value + 0.1], "versus": versus}
        for name, value, versus in zip(run.summary["sites"], run.by_site(), verdicts)
    ]
    evidence = {"level": 0.95, "metric": run.metric, "sites": sites}
    evidence["worst"] = {"site": sites[0]["name"], "value": 0.5, "interval": [0.4, 0.6]}
    return replace(run, summary=run.summary | {"evidence": evidence})


def _sites_table(read, column):
    """Returns the table of the sites that has a column."""
    return next(table for table in read.tables if table[0][0] == "site" and column in table[0])


COMPARED = [_versus("better", 0.03, 0.09), _versus("worse", -0.08, -0.02), _versus("unclear", -0.01, 0.02), {}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sweep of three step sizes of which one diverges, with validation samples and two seeds."""
    folder = tmp_path_factory.mktemp("report") / "sweep"
    experiment = fm.Experiment(
        fm.data.Digits(nodes=4, odd=1, validation_share=0.2),
        fm.Ring(),
        fm.ChocoSGD(),
        rounds=6,
        seeds=(0, 1),
        sweep={"primal_step.start": [0.01, 1.0, 1e30]},
        options=fm.Options(measure_every=2, on_divergence="mark"),
    )
    fm.run(experiment, out=folder)
    report([folder])
    return folder


def test_page_is_whole_and_needs_nothing_else(trained):
    text = (trained / "report.html").read_text()
    read = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in read.elements}
    assert not [
        value
        for _, known in read.elements
        for key, value in known.items()
        if key in ("src", "href") and value[0] != "#"
    ]
    assert "://" not in text.replace("http://www.w3.org/", "")
    (policy,) = [known["content"] for _, known in read.elements if known.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert not {"script-src", "connect-src", "img-src"} & rules.keys()
    (style,) = read.texts["style"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules["style-src"] == f"'sha256-{digest}'"
    assert not [known for _, known in read.elements if "style" in known], "the policy would ignore it"
    assert text.index("Content-Security-Policy") < text.index("<style")
    ids = [known["id"] for _, known in read.elements if "id" in known]
    assert len(ids) == len(set(ids))


def test_page_can_be_read_aloud(trained):
    text = (trained / "report.html").read_text()
    read = Page(text)
    assert read.of("html")[0]["lang"] == "en"
    assert all(known.get("scope") in ("col", "row") for known in read.of("th"))
    pictures = [known for known in read.of("svg") if known.get("aria-hidden") != "true"]
    assert len(pictures) == len(read.of("figure")) == len(read.of("figcaption")) > 0
    assert all(known["role"] == "img" for known in pictures)
    assert all(text.startswith("<title>") for text in re.findall(r'<svg class="chart"[^>]*>(.{7})', text))
    assert len(read.of("h1")) == 1


def test_sweep_is_ranked_by_validation_with_diverged_variants_last(trained):
    found = json.loads((trained / "report.json").read_text())["runs"][0]
    steps = [row["changes"]["primal_step.start"] for row in found["sweep"]["variants"]]
    assert (steps[-1], found["sweep"]["ranked_on"]) == (1e30, "validation")
    validated = [row["validation_worst"] for row in found["sweep"]["variants"]]
    assert validated[0] >= validated[1]
    assert validated[2] is None
    table = next(table for table in Page((trained / "report.html").read_text()).tables if table[0][0] == "rank")
    assert len(table) == 4
    assert table[-1][-1] == "diverged"


def test_json_says_where_the_model_comes_from(trained):
    found = json.loads((trained / "report.json").read_text())["runs"][0]
    assert found["graph"]["edges"] == [[0, 1], [0, 3], [1, 2], [2, 3]]
    assert found["provenance"]["versions"].keys() == {"fairmesh", "torch", "python"}
    data = found["provenance"]["data"]
    assert data["classes"] == 10
    assert all(sum(site["classes"]["test"]) == site["test"] for site in data["sites"])
    assert [site["n"] for site in found["sites"]] == [site["test"] for site in data["sites"]]
    assert all(len(one["sha256"]) == 64 and one["holds"] for one in found["files"])
    assert found["files"]


@pytest.mark.parametrize("taken", ["traffic", "sweep"], ids=["by the report", "by another section"])
def test_section_cannot_take_a_key_that_is_taken(trained, monkeypatch, taken):
    last = sections.sections()[-1]
    monkeypatch.setattr(last, "told", lambda run, chosen: {taken: 1}, raising=False)
    with pytest.raises(TypeError, match=taken):
        card(Run.from_folder(trained))


def test_digest_of_data_changes_with_the_data_and_not_with_the_rest(tmp_path):
    def digest(seed, rounds):
        folder = tmp_path / f"{seed}-{rounds}"
        fm.run(fm.Experiment(fm.data.Digits(nodes=4, seed=seed), fm.Ring(), fm.ChocoSGD(), rounds=rounds), out=folder)
        return json.loads((folder / "summary.json").read_text())["provenance"]["data"]

    first, longer, other = digest(0, 1), digest(0, 2), digest(1, 1)
    assert first == longer
    assert first["sites"][0]["digest"] != other["sites"][0]["digest"]
    assert first["digest"] != other["digest"]


def test_model_card_keeps_what_people_wrote(trained):
    path = trained / "model-card.md"
    first = path.read_text()
    blank = first.split("<!-- yours: intended-use -->\n")[1].split("\n<!-- end -->")[0]
    path.write_text(first.replace(blank, "For *screening*\n\nonly."))
    report([trained])
    assert path.read_text() == first.replace(blank, "For *screening*\n\nonly.")
    path.write_text(first)


def test_model_card_names_files_and_digests(trained):
    found = json.loads((trained / "report.json").read_text())["runs"][0]
    text = (trained / "model-card.md").read_text()
    for one in found["files"]:
        assert one["sha256"] in text
    for site in found["provenance"]["data"]["sites"]:
        assert site["digest"][:16] in text


def test_model_card_escapes_the_names_of_sites():
    text = model_card(card(_run([0.9, 0.8, 0.7, 0.6], names=["a|b", "*c*", "<d>", "e"])))
    assert "a\\|b" in text
    assert "\\*c\\*" in text
    assert "\\<d\\>" in text


def test_several_runs_stand_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, algorithm in (("a", fm.ChocoSGD()), ("b", fm.TrackedADGDA())):
        fm.run(fm.Experiment(fm.data.Digits(nodes=4, odd=1), fm.Ring(), algorithm, rounds=2), out=tmp_path / name)
    report([tmp_path / "a", tmp_path / "b"], json_=True)
    written = json.loads(capsys.readouterr().out)
    assert written["model_card"] is None
    assert [run["label"] for run in json.loads((tmp_path / written["json"]).read_text())["runs"]] == ["a", "b"]
    read = Page((tmp_path / written["report"]).read_text())
    assert ["site", "a", "b"] in [table[0] for table in read.tables]
    assert len(read.of("section")) == 2


def _decided(run, weights, **more):
    """Returns a run that has decided itself which weights its model has."""
    return replace(run, summary=run.summary | {"handed_out": {"weights": weights, "why": "so it is"}} | more)


def _captions(runs):
    return Page(page(runs, "a run")).texts["figcaption"]


def test_weights_are_shown_next_to_the_share_of_the_rows_in_the_round_of_the_model():
    record = _record(0, [0.9, 0.8, 0.7, 0.6], **{"lambda": [0.1, 0.2, 0.3, 0.4]})
    told = {"provenance": {"versions": {}, "data": _told_data([10, 10, 20, 40])}, "prior": [0.125, 0.125, 0.25, 0.5]}
    robust = _decided(_run(record), "robust", **told)
    (caption,) = (text for text in _captions([robust]) if "λ" in text)
    assert missing_from(caption, "round 10", "share of all training rows") == []
    glance = _sites_table(Page(page([robust], "a run")), "prior, %")
    assert [row[-2:] for row in glance[1:]] == [["10.0", "12.5"], ["20.0", "12.5"], ["30.0", "25.0"], ["40.0", "50.0"]]
    uniform = _decided(robust, "robust", prior=[0.25] * 4)
    assert not any("share of all training rows" in text for text in _captions([uniform]))


def _told_data(rows):
    sites = [
        {"name": name, "train": count, "validation": 0, "test": 9, "group": ""} for name, count in zip(NAMES, rows)
    ]
    return {"inputs": [2], "classes": 2, "sites": [site | {"digest": ""} for site in sites], "digest": ""}


def test_fixed_weights_that_are_handed_out_are_said_where_the_picture_would_be():
    record = _record(0, [0.9, 0.8, 0.7, 0.6], **{"lambda": [0.1, 0.2, 0.3, 0.4]})  # of the robust run beside it
    fixed = _decided(_run(record), "fixed")
    assert not any("λ" in text for text in _captions([fixed]))
    assert any(missing_from(text, "handed out", "fixed weights", "so it is") == [] for text in _notes(fixed))
    (kept,) = [text for text in _notes(_run([0.9, 0.8, 0.7, 0.6])) if text.startswith("Weights")]
    assert "fixed" in kept


def _notes(run):
    return Page(page([run], "a run")).texts["p"]


def _own_models_run(folder=None):
    """A run whose sites are given models of their own. The common model is worst at another site than these are."""
    values = {"common": [0.9, 0.5, 0.8, 0.7], "local": [0.6] * 4, "personal": [0.9, 0.8, 0.85, 0.75]}
    shares = {"common": 0.0, "adapted": 1.0, "own": 0.0}
    sites = [
        {"name": name, "weights": {}, "shares": shares, "rows": 9}
        | {"test": {model: {"accuracy": of[i]} for model, of in values.items()}}
        for i, name in enumerate(NAMES)
    ]
    verdicts = dict(zip(NAMES, ("better", "better", "better", "worse")))
    evidence = [
        {"name": name, "value": value, "interval": [value - 0.1, value + 0.1]}
        | {"versus": {"local": {"difference": 0.1, "interval": [0.02, 0.2], "verdict": verdicts[name]}}}
        for name, value in zip(NAMES, values["personal"])
    ]
    over = {"worst": {"site": "west", "value": 0.75, "interval": [0.65, 0.85], "versus": {}}}
    over |= {"mean": {"value": 0.825, "interval": [0.8, 0.85], "versus": {"local": evidence[0]["versus"]["local"]}}}
    told = {"metric": "accuracy", "judged_on": "test", "level": 0.95, "sites": evidence} | over
    personal = [{"replica": 0, "method": "choice", "sites": sites}]
    return _run(values["common"], personal=personal, site_models_evidence=told, folder=folder)


def test_worst_site_is_the_same_one_everywhere_by_the_models_that_sites_are_given(tmp_path):
    (tmp_path / "experiment.toml").write_text('[topology]\nname = "ring"\n')
    run = _own_models_run(tmp_path)
    drawn = card(run)
    glance = _sites_table(Page(page([run], "a run")), "its model")
    assert [row[0] for row in glance if row[0].endswith("worst")] == ["west worst"]
    with pytest.MonkeyPatch.context() as patch:
        nodes = []
        patch.setattr("fairmesh.report.charts.network", lambda found, *_, **__: nodes.extend(found) or "")
        network(sections.View(drawn, [run], alone=True))
    assert [node.name for node in nodes if node.worst] == ["west"]
    told = told_of(run)
    assert told["worst_first"][0] == NAMES.index("west")
    assert told["worst"] == (0.75, [0.65, 0.85])


def test_page_of_a_finished_run_compares_the_models_that_sites_are_given_with_alone():
    told = told_of(_own_models_run())
    north = told["sites"][0]
    assert north["value"] == (0.9, [0.8, 1.0])
    assert (north["alone"], north["uses"]) == ((0.6, None), "adapted")
    assert [site["verdicts"][0]["verdict"] for site in told["sites"]] == ["better", "better", "better", "worse"]
    assert north["verdicts"][0]["against"] == "alone"
    assert told["advice"] == "Every site should use a model adapted from the common one."


def test_models_and_curves_look_as_on_the_live_page():
    live = replace(simulation(), replicas=1)
    live = replace(live, sites=tuple(replace(one, fixed=Estimate(0.5), uses="own") for one in live.sites))
    weights = {"sites": {name: {"fixed": 0.4, "outcome": "hurt"} for name in NAMES}}
    record = _record(0, [0.9, 0.5, 0.8, 0.7], **{"lambda": [0.1, 0.2, 0.3, 0.4]})
    run = _own_models_run()
    run = replace(run, records=[record], summary=run.summary | {"weights": weights, "final": [record]})
    pages = rendered(live)["pictures"], page([run], "a run")
    for label in ("its model", "alone", "fixed weights", "mean over sites", "worst site", "prior", "weight λ"):
        here, there = (_looks(text, label) for text in pages)
        assert here == there != set(), label


def _looks(text, label):
    """Returns how lines, marks and bars look that legends name so: their colours, and whether they are dashed."""
    keys = re.findall(r'<li><svg class="key"[^>]*>(.*?)</svg>([^<]*)', text)
    looks = {look for key, name in keys if name == label for look in re.findall(r'class="([^"]*)"', key)}
    return {look for look in looks if not look.startswith("band")}


def test_default_comes_first_and_its_rivals_are_folded():
    rivals = [replace(_run([value] * 4), label=label) for label, value in (("rival", 0.9), ("other", 0.8))]
    runs = [*rivals, _decided(replace(_run([0.7] * 4), label="default"), "robust")]
    text = page(runs, "three runs")
    summaries = Page(text).texts["summary"]
    assert [said.split(":")[0] for said in summaries if said.split(":")[0] in ("rival", "other")] == ["rival", "other"]
    first_screen = text[: text.index("Next to the others")]
    assert "<h2>default</h2>" in first_screen
    assert "70.0" in first_screen
    assert "90.0" not in first_screen
    assert Page(page(rivals, "two runs")).texts["h2"][0] == "rival", "without a default, the first one given"


def test_page_of_several_runs_says_in_what_they_differ_besides():
    long, short = _run([0.9] * 4), _run([0.8] * 4)
    long.summary["rounds"] = 400
    runs = [replace(long, label="long"), replace(short, label="short")]
    assert f"differ in rounds: 400 and {short.summary['rounds']}" in page(runs, "two runs")


def test_report_is_written_without_matplotlib(tmp_path, monkeypatch):
    def missing():
        raise AssertionError("matplotlib is not needed")

    monkeypatch.setattr("fairmesh.report.style.loaded_matplotlib", missing)
    fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=2), out=tmp_path / "run")
    report([tmp_path / "run"])
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


def test_runs_with_other_metrics_are_refused():
    with refused("metric", "loss", "accuracy"):
        page([_run([0.9] * 4), _run([0.9] * 4, metric="loss")], "both")


def test_verdicts_lead_the_page_and_the_json():
    run = _evidence(_run([0.9, 0.5, 0.8, 0.7]), COMPARED)
    found = card(run)
    read = Page(page([run], "a run"))
    better, worse, unclear, unknown = (site["sentence"] for site in found["sites"])
    assert "3 to 9 points" in better
    assert "better" in better
    assert "2 to 8 points" in worse
    assert "worse" in worse
    assert "−1 to +2 points" in unclear
    assert not {"better", "worse"} & set(unknown.replace(",", " ").split())
    said = read.texts["li"]
    assert [text.split(":")[0] for text in said[:4]] == NAMES
    assert "40.0 to 60.0" in found["sentence"]
    assert [known.get("class") for known in read.of("b")[:4]] == ["better", "worse", None, None]


def test_worst_site_has_one_interval_in_the_sentence_the_table_and_on_the_page():
    run = _evidence(_run([0.9, 0.5, 0.8, 0.7]), COMPARED)
    run.summary["evidence"]["worst"]["interval"] = [0.31, 0.71]  # of the lowest of all sites, whichever that is
    told = told_of(run)
    assert told["worst"] == told["sites"][1]["value"] == (0.5, [0.4, 0.6])
    assert "50.0 % (40.0 to 60.0)" in card(run)["sentence"]
    assert "31.0" not in page([run], "a run")
    run.summary["evidence"]["covers"] = "samples"
    several = page([run, replace(run, label="other")], "two runs")
    assert missing_from(several, "31.0 to 71.0", "allows for not knowing which site it is") == []


def test_live_page_of_a_sweep_has_one_worst_site_and_one_interval_of_it(trained):
    told = told_of(Run.from_folder(trained))
    (shown,) = [variant for variant in told["variants"] if variant["shown"]]
    assert shown["worst"] == (told["worst"][0], None)
    assert "best of 3 candidates" in told["notes"][0]


def test_first_screen_says_how_much_has_left_a_site():
    (said,) = [text for text in _notes(_run([0.9, 0.5, 0.8, 0.7])) if "leaves a site" in text]
    assert missing_from(said, "1 kB of model messages at the busiest one", "4 kB at all together", "no rows") == []
    assert not [text for text in _notes(_run([0.9] * 4, bytes_total=0)) if "leaves a site" in text]
    wire = {"site": "north", "payload_out": 18_200_000, "overhead_out": 800_000}
    told = traffic_sentence({"traffic": {"on_the_wire": wire}})
    assert told == "What has left north: 18.2 MB of model messages and 800 kB of overhead; no rows."


def test_counts_that_did_not_travel_are_not_invented():
    run = _evidence(_run([0.9, 0.5, 0.8, 0.7], support=[{}, {}, {}, {}]), COMPARED)
    for site in run.summary["evidence"]["sites"][:2]:
        site |= {"n_at_least": True}
    run.summary["evidence"]["sites"][3] |= {"n": math.nan, "interval": [math.nan] * 2, "why_not": "withheld by it"}
    sites = card(run)["sites"]
    assert [site["n_at_least"] for site in sites] == [True, True, False, False]
    assert (sites[3]["n"], sites[3]["interval"], sites[3]["measured"]) == (None, None, True)
    assert "withheld by it" in sites[3]["sentence"]
    other = replace(run, summary=run.summary | {"evidence": run.summary["evidence"] | {"metric": "auroc"}})
    assert not card(other)["sites"][0]["versus"]


def test_sentences_of_a_metric_where_less_is_better():
    verdicts = [{"local": {"difference": -0.3, "interval": [-0.5, -0.1], "verdict": "better"}}, {}, {}, {}]
    run = _evidence(_run([0.9, 0.5, 0.8, 0.7], metric="loss"), verdicts)
    found = card(run)
    assert "0.1 to 0.5" in found["sites"][0]["sentence"]
    assert "south" in found["sentence"], "the worst site has the largest loss"
    table = next(table for table in Page(page([run], "a run")).tables if table[0][0] == "site")
    assert "lower" in " ".join(table[0])


def test_undefined_and_unmeasured_sites_are_said_to_be():
    record = _record(0, [0.9, math.nan, 0.8, math.nan], [0.1, 0.3, 0.2, math.nan])
    run = _run(
        record, support=[{"n": 9, "classes": [4, 5]}, {"n": 3, "classes": [3, 0]}, {"n": 4, "classes": [2, 2]}, None]
    )
    found = card(run)
    assert [site["measured"] for site in found["sites"]] == [True, True, True, False]
    glance = _sites_table(Page(page([run], "a run")), "accuracy")
    assert [row[1] for row in glance[1:]] == ["90.0", "not defined", "80.0", "not measured"]
    table = _sites_table(Page(page([run], "a run")), "per class")
    at = table[0].index("accuracy")
    assert [row[at] for row in table[1:]] == ["90.0 %", "not defined", "80.0 %", "not measured"]
    assert [row[table[0].index("per class")] for row in table[1:3]] == ["4 / 5", "3 / 0"]
    assert "not measured" in model_card(found)


def test_references_of_an_unmeasured_site_are_not_measured_and_classes_have_their_names():
    record = _record(0, [0.9, math.nan, 0.8, math.nan], [0.1, 0.3, 0.2, math.nan])
    local = {"title": "alone", "metric": "accuracy", "diverged": False, "sites": [0.8, 0.7, math.nan, math.nan]}
    support = [{"n": 9, "classes": [4, 5]}] * 3
    facts = {"model": {"classes": ["benign", "<ill>"]}, "references": {"local": local}}
    run = _run(record, support=[*support, None], **facts)
    table = [table for table in Page(page([run], "a run")).tables if table[0][0] == "site"][1]
    assert [row[-1] for row in table[1:]] == ["80.0 %", "70.0 %", "not defined", "not measured"]
    assert any("benign / <ill>" in heading for heading in table[0])
    many = [{"n": 9, "classes": [1] * 9}] * 4
    names = [f"digit {k}" for k in range(9)]
    tables = Page(page([_run(record, support=many, model={"classes": names})], "a run")).tables
    assert ["site", *names] in [table[0] for table in tables]


def test_sites_that_train_alone_are_judged_by_their_own_models():
    data = fm.data.Digits(nodes=4, odd=1, instrument="shifted")
    result = fm.run(fm.Experiment(data, algorithm=fm.algorithms.Local(), rounds=20))
    run = Run.from_result(result)
    for site in card(run)["sites"]:
        assert site["interval"][0] < site["metrics"]["accuracy"] < site["interval"][1]
    assert run.records[-1]["accuracy"] == result.final[0]["own_models"]["accuracy"]
    assert run.summary["metrics"]["accuracy"]["worst"] == result.final[0]["own_models"]["accuracy"]["worst"]
    assert "own model" in page([run], "a run")


def test_diverged_replicas_are_left_out_and_named():
    wild = _record(1, [0.01, 0.01, 0.01, 0.01])
    run = _run([0.9, 0.8, 0.7, 0.6], wild, diverged=[1])
    assert card(run)["over_sites"]["worst"] == 0.6
    assert "diverged" in " ".join(rows_of([run])[1])
    lost = _run(wild | {"replica": 0}, diverged=[0])
    assert "diverged" in card(lost)["sentence"]
    assert dict(zip(*rows_of([lost])))["mean"] == "diverged"
    Page(page([lost], "a run"))


def test_sweep_is_ranked_by_a_worst_site_that_has_enough_rows():
    rows = [[0.0, 0.4, 0.9, 0.9], [0.0, 0.7, 0.9, 0.9], [0.0, 0.7, 1.0, 0.9]]  # the first site has one test row
    variants = [
        {"changes": {"step": k}, "replicas": [k], "evidence": {"metric": "accuracy", "worst": {"value": row[1]}}}
        for k, row in enumerate(rows)
    ]
    found, _ = ranked(_run(*rows, variants=variants, chosen=None))
    assert [one.summary["variants"][0]["changes"]["step"] for one in found] == [2, 1, 0], "of equals, the better mean"


def test_sweep_without_validation_is_ranked_on_what_it_is_judged_on():
    rows = [[0.5 + 0.03 * k] * 4 for k in range(12)]
    variants = [{"changes": {"step": k}, "replicas": [k]} for k in range(12)]
    run = _run(*rows, variants=variants)
    best, ranked_on = ranked(run)
    assert (best[0].summary["variants"][0]["changes"], ranked_on) == ({"step": 11}, "test")
    lower = ranked(_run(*rows, variants=variants, metric="loss"))[0]
    assert lower[0].summary["variants"][0]["changes"] == {"step": 11}, "the smallest loss"
    read = Page(page([run], "a sweep"))
    assert sum(len(table) - 1 for table in read.tables if table[0][0] == "rank") == 12


def test_many_sites_are_folded_with_the_worst_first():
    names = [f"site {k}" for k in range(50)]
    values = [0.5 + 0.3 * ((7 * k) % 50) / 50 for k in range(50)]
    verdicts = [
        _versus("worse" if k in (4, 9) else "better", *((-0.2, -0.1) if k in (4, 9) else (0.1, 0.2))) for k in range(50)
    ]
    run = _evidence(_run(values, names=names), verdicts)
    read = Page(page([run], "a run"))
    glance = _sites_table(read, "accuracy")
    assert len(glance) == 51, "sixty rows fit the first screen"
    shown = [float(row[1].split()[0]) for row in glance[1:]]
    assert shown[:2] == sorted(shown[:2]), "those that are worse than alone come first"
    assert shown[2:] == sorted(shown[2:]), "then the worst"
    assert {name for name, *_ in glance[1:3]} == {"site 4", "site 9"}
    (worst,) = (float(row[1].split()[0]) for row in glance[1:] if row[0].endswith("worst"))
    assert worst == min(shown)
    table = _sites_table(read, "95 % interval")
    assert len(table) < 30, "the table with all comparisons is folded after twelve sites"


def test_sites_that_chance_explains_are_told_as_a_number_and_not_by_name():
    names = [f"site {k}" for k in range(60)]
    verdicts = [_versus("unclear", 0.02, 0.2) if k < 3 else _versus("unclear", -0.1, 0.1) for k in range(60)]
    run = _evidence(_run([0.8] * 60, names=names), verdicts)
    assert missing_from(card(run)["sentence"], "3 of 60", "chance", "none remains") == []
    assert "site 3" not in " ".join(Page(page([run], "a run")).texts["p"])
    remaining = [_versus("better", 0.02, 0.2), *verdicts[:2], *verdicts[3:]]
    assert "1 remains" in card(_evidence(run, remaining))["sentence"]
    assert "chance" not in card(_evidence(run, [remaining[0], *verdicts[3:], *verdicts[3:5]]))["sentence"]


def test_worst_site_of_curves_and_metrics_has_enough_test_rows():
    run = _evidence(_run([0.1, 0.8, 0.7, 0.6]), COMPARED)
    assert run.over_sites("worst") == 0.1
    run.summary["evidence"]["sites"][0]["few_rows"] = True
    assert (run.over_sites("worst"), run.over_sites("gap")) == (0.6, pytest.approx(0.2))
    assert set(run.curve("worst", "rounds")[1]) == {0.6}


def test_names_of_sites_are_text_and_no_markup():
    text = page([_run([0.9, 0.8, 0.7, 0.6])], "<script>alert(1)</script>")
    read = Page(text)
    assert not read.of("script")
    assert "south <b>$x$</b>" in read.texts["th"]


def test_report_does_not_import_a_topology_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    (tmp_path / "experiment.toml").write_text(f'[topology]\nname = "import"\npath = "{tmp_path}/mine.py:Mine"\n')
    assert card(_run([0.9, 0.8, 0.7, 0.6], folder=tmp_path))["graph"] is None


def test_own_metrics_and_their_direction_are_in_the_report():
    record = _record(0, [0.9, 0.8, 0.7, 0.6]) | {"delay": _record(0, [0.1, 0.2, 0.3, 0.4])["loss"]}
    run = _run(record)
    found = card(run)
    assert list(found["metrics"]) == ["accuracy", "loss", "delay"]
    assert not found["metrics"]["delay"]["higher_is_better"]
    headers = [cell for table in Page(page([run], "a run")).tables for cell in table[0]]
    assert any(cell.startswith("delay") for cell in headers)


def test_leave_one_out_is_shown_next_to_the_run(tmp_path):
    values = {"accuracy": [[0.5, 0.6, 0.7, math.nan], [0.7, 0.6, 0.7, math.nan]]}
    told = {"judged_on": "test", "metric": "accuracy", "sites": NAMES, "values": values}
    (tmp_path / "leave_one_out.json").write_text(json.dumps(told).replace("NaN", "null"))
    run = _run([0.9, 0.8, 0.7, 0.6], folder=tmp_path)
    tables = Page(page([run], "a run")).tables
    table = next(table for table in tables if sum("accuracy" in cell for cell in table[0]) == 2)
    assert [row[1] for row in table[1:]] == ["60.0 %", "60.0 %", "70.0 %", "not defined"]


@pytest.fixture(scope="module")
def with_reference(tmp_path_factory):
    """A run next to a reference that was hardly trained, on the same rows."""
    folder = tmp_path_factory.mktemp("references") / "run"
    result, alone = (
        fm.run(fm.Experiment(fm.data.Digits(nodes=4, odd=1), algorithm=fm.algorithms.DSGD(), rounds=rounds), out=out)
        for rounds, out in ((60, folder), (1, None))
    )
    summary = json.loads((folder / "summary.json").read_text())
    summary["evidence"] = result.evidence(against={"local": alone})
    table = {"title": "alone", "diverged": False, "sites": alone.final[0]["accuracy"]["sites"]}
    summary["references"] = {
        "local": table | {"folder": "references/local"},
        "pooled": {"title": "pooled", "diverged": True, "sites": [None] * 4, "folder": "references/pooled"},
        "constant": {"title": "constant", "failed": "it raised"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_references_are_compared_row_by_row_with_what_the_run_kept(with_reference):
    found = card(Run.from_folder(with_reference))
    assert [site["versus"]["local"]["verdict"] for site in found["sites"]] == ["better"] * 4
    assert all("better" in site["sentence"] for site in found["sites"])
    assert all(site["interval"][0] < site["metrics"]["accuracy"] < site["interval"][1] for site in found["sites"])
    assert not [hint for hint in found["hints"] if "--with-references" in hint]
    said = " ".join(found["notes"])
    assert "diverged" in said
    assert "it raised" in said
    read = Page(page([Run.from_folder(with_reference)], "a run"))
    table, glance = _sites_table(read, "95 % interval"), _sites_table(read, "accuracy")
    assert all("better" in row[table[0].index("alone")] for row in table[1:])
    assert all("▲" in row[glance[0].index("alone")] for row in glance[1:])


def test_answers_of_another_version_are_left_out_and_the_report_names_the_version(tmp_path):
    (tmp_path / "outcomes.safetensors").write_bytes(save({}, {"outcomes": '{"format": 1}'}))
    found = card(_run([0.9, 0.8, 0.7, 0.6], folder=tmp_path))
    assert found["calibration"] is None
    assert [note for note in found["notes"] if "outcomes.safetensors" in note and "format 1" in note]


def test_calibration_counts_every_prediction_of_every_site(with_reference):
    found = card(Run.from_folder(with_reference))
    assert sum(one["n"] for one in found["calibration"]["bins"]) == sum(site["n"] for site in found["sites"])
    assert all(0 <= one["accuracy"] <= 1 and one["confidence"] > 0 for one in found["calibration"]["bins"])
    weighted = sum(one["n"] * one["accuracy"] for one in found["calibration"]["bins"])
    right = sum(site["n"] * site["metrics"]["accuracy"] for site in found["sites"])
    assert weighted == pytest.approx(right)
    assert all(0 <= site["error"] <= 1 for site in found["calibration"]["sites"])


@pytest.mark.parametrize(
    ("share", "value", "shown"),
    [
        (True, 0.8123, "81.2 %"),
        (False, 12.3456, "12.35"),
        (True, math.nan, "not defined"),
        (False, None, "not defined"),
    ],
)
def test_unit_shows_shares_in_per_cent_and_what_is_not_defined(share, value, shown):
    assert Unit("metric", share).shown(value) == shown


def test_curves_leave_out_values_that_are_not_finite():
    run = _run([0.9, 0.8, 0.7, 0.6])
    run.records[0]["accuracy"] = run.records[0]["accuracy"] | {"worst": torch.inf}
    assert run.curve("worst", "rounds")[0] == [5, 10]
