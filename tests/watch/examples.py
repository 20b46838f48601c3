"""Views of a simulation, of nodes and of a private run, for tests of what shows them."""

from dataclasses import replace

from fairmesh.metrics.units import Unit
from fairmesh.watch.view import (
    Curve,
    Curves,
    Edge,
    Estimate,
    Line,
    Privacy,
    Refusal,
    Site,
    Traffic,
    Verdict,
    View,
    Vote,
    Wait,
)

NOW = 1_900_000_000.0
HOSTILE = "<img src=x onerror=alert(1)>"
LONG = "a-hospital-with-a-name-of-" + "very-" * 40 + "many-letters"
ACCURACY = Unit("accuracy", share=True)
OTHERS_SAY = frozenset({"doing", "round", "value", "value_round", "weight", "bytes_sent", "epsilon"})


def _curve(values: list[float], spread: float = 0.0) -> Curve:
    if not spread:
        return Curve(tuple(values))
    low, high = (tuple(value + sign * spread for value in values) for sign in (-1, 1))
    return Curve(tuple(values), low, high)


def _learning(best: float, count: int) -> list[float]:
    return [best * (1 - 0.5 / (1 + k / 4)) for k in range(count)]


def _ring(count: int) -> tuple[tuple[int, int], ...]:
    return tuple((k, (k + 1) % count) for k in range(count))


def simulation() -> View:
    """A simulation in progress: four sites on a ring, three replicas."""
    names, best = ("north", "east", "south", "west"), (0.71, 0.83, 0.80, 0.86)
    weights, priors, rows = (0.41, 0.22, 0.20, 0.17), (0.15, 0.25, 0.25, 0.35), (180, 400, 390, 600)
    rounds = tuple(range(0, 1841, 40))
    values = [_learning(value, len(rounds)) for value in best]
    sites = tuple(
        Site(
            name,
            state="at work",
            round=1840,
            value=Estimate(value, (value - 0.07, value + 0.06)),
            value_round=1840,
            rows=count,
            weight=weight,
            prior=prior,
            alone=Estimate(value - 0.06),
        )
        for name, value, weight, prior, count in zip(names, best, weights, priors, rows)
    )
    return View(
        kind="run",
        title="wards",
        state="training",
        sentence="round 1,840 of 4,000, about 25 minutes left; worst site north, 71.0 % (64.0 to 77.0)",
        urgency="fine",
        seen_at=NOW,
        news_at=NOW - 1,
        live=True,
        algorithm="AD-GDA",
        round=1840,
        rounds=4000,
        rounds_per_s=1.44,
        seconds_left=1500.0,
        metric=ACCURACY,
        sites=sites,
        order=(0, 2, 1, 3),
        worst=Estimate(0.71, (0.64, 0.77)),
        worst_site=0,
        mean=Estimate(0.80, (0.78, 0.82)),
        edges=tuple(Edge(ends) for ends in _ring(4)),
        curves=Curves(
            rounds, _curve(values[0], 0.02), _curve(_learning(0.80, len(rounds)), 0.01), tuple(map(_curve, values))
        ),
        replicas=3,
        traffic=Traffic("the busiest site", sent=48_200_000, total=190_000_000, per_s=37_700.0),
        notes=("A node's numbers are means over 3 replicas.",),
    )


def node() -> View:
    """A node of a mesh of five, in which east cannot be reached."""
    names = ("west", "north", "east", "south", "centre")
    best, weights = (0.84, 0.70, 0.79, 0.81, 0.85), (0.15, 0.38, 0.18, 0.17, 0.12)
    rounds = tuple(range(0, 1201, 40))
    values = [_learning(value, len(rounds)) for value in best]
    silent = {"heard_s_ago": 721.0, "state": "unreachable", "doing": "silent; was training"}
    sites = tuple(
        Site(
            name,
            round=1203,
            value=Estimate(value),
            value_round=1200,
            weight=weight,
            prior=0.2,
            bytes_sent=31_000_000,
            own=name == "west",
            claimed=frozenset() if name == "west" else OTHERS_SAY,
            **(silent if name == "east" else {"heard_s_ago": 4.0, "state": "waits", "doing": "training"}),
        )
        for name, value, weight in zip(names, best, weights)
    )
    return View(
        kind="node",
        title="oncology",
        state="training",
        sentence="east has been unreachable for 12 minutes; nothing is lost; call its operator",
        urgency="act",
        seen_at=NOW,
        news_at=NOW - 1,
        live=True,
        seen_from="west",
        round=1203,
        rounds=4000,
        metric=ACCURACY,
        sites=sites,
        order=(0, 2, 1, 3, 4),
        worst=Estimate(0.70),
        worst_site=1,
        mean=Estimate(0.798),
        edges=(Edge((0, 1), True, 9_100_000, 9_000_000), Edge((0, 2), False, 9_100_000, 9_050_000), Edge((2, 3))),
        waits=(Wait(0, 2, 718.0), Wait(3, 2, 720.0, seen=False), Wait(1, 0, 716.0, seen=False)),
        chain=(0, 2),
        curves=Curves(rounds, _curve(values[1]), _curve(_learning(0.798, len(rounds))), tuple(map(_curve, values))),
        traffic=Traffic("this site", 18_200_000, 18_050_000, on_the_wire=19_000_000, per_s=0.0),
        refusals=(Refusal(3, 1, "the norm of its message is 1e+30", 95.0, "north denies it: ask south too"),),
        votes=(Vote("remove east", ("south",)),),
        log=(
            Line("2030-03-17T17:34:42Z", "info", "connected: site centre"),
            Line("2030-03-17T17:35:02Z", "warning", "waiting: site east, since 2030-03-17 17:34:42, seconds 20"),
        ),
        says=("votes to remove east: south",),
    )


def private() -> View:
    """A private simulation that has ended."""
    run = simulation()
    worse = Verdict("alone", "worse", "worse than alone (−9 to −3 points)")
    better = Verdict("alone", "better", "better than alone (+2 to +8 points)")
    sites = tuple(
        replace(site, state="ended", epsilon=7.4, verdicts=(worse if site.name == "north" else better,))
        for site in run.sites
    )
    return replace(
        run,
        title="wards-private",
        state="finished",
        sentence="finished after 4,000 rounds; better than alone at 3 of 4 sites, worse at 1; worst site north, 71.0 %",
        news_at=NOW - 7200,
        live=False,
        round=4000,
        rounds_per_s=None,
        seconds_left=None,
        sites=sites,
        privacy=Privacy(
            7.4,
            8.0,
            1e-5,
            "patient",
            ("Private per patient: no site has spent more than epsilon = 7.4 of 8 at delta = 1e-05.",),
        ),
    )


def sixty() -> View:
    """A node of a mesh of 60 sites. One has a hostile name, and one a very long one."""
    names = [f"site-{k:02}" for k in range(58)] + [HOSTILE, LONG]
    sites = tuple(
        Site(
            name,
            own=k == 0,
            state=("at work", "waits", "silent", "unknown")[k % 4 if k else 0],
            doing="training",
            round=300 + k % 2,
            heard_s_ago=float(k),
            value=None if k % 4 == 3 else Estimate(0.6 + 0.005 * k),
            value_round=300,
            weight=1 / 60,
            prior=1 / 60,
            bytes_sent=1_000_000 + k,
            remarks=(f"{HOSTILE} has a new key",) if k == 58 else (),
            claimed=OTHERS_SAY if k else frozenset(),
        )
        for k, name in enumerate(names)
    )
    return View(
        kind="node",
        title=f"mesh {HOSTILE}",
        state="training",
        sentence=f"round 300 of 1,000, about 12 minutes left; worst site {HOSTILE}, 60.0 %",
        urgency="fine",
        seen_at=NOW,
        news_at=NOW - 2,
        live=True,
        seen_from="site-00",
        round=300,
        rounds=1000,
        rounds_per_s=0.97,
        seconds_left=720.0,
        metric=ACCURACY,
        sites=sites,
        order=tuple(range(60)),
        worst=Estimate(0.6),
        worst_site=58,
        mean=Estimate(0.75),
        edges=tuple(Edge(ends, True if 0 in ends else None) for ends in _ring(60)),
        waits=tuple(Wait(k, k + 1, 3.0, seen=False) for k in range(1, 59, 4)),
        traffic=Traffic("this site", 2_000_000, 2_000_000, on_the_wire=2_200_000, per_s=6_000.0),
        refusals=(Refusal(58, 59, f"</script><script>alert('{HOSTILE}')</script>", 12.0, f"{LONG} has not said"),),
        votes=(Vote(f"remove {HOSTILE}", tuple(names[:20])),),
        log=(Line("2030-03-17T17:34:42Z", "warning", f"vote: site {HOSTILE}"),),
        says=(f"votes to remove {HOSTILE}: site-00",),
        removed=("left-once",),
    )


VIEWS = {view.__name__: view for view in (simulation, node, private, sixty)}
