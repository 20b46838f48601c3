"""What is shown of a run or of a node at one moment, as numbers and plain text.

A source (`watch/sources.py`) makes views of files, and the page shows them. Names, reasons and log lines may be words
of other sites: nothing here is escaped. Sites are named by their position in `View.sites`. Durations were taken by one
clock and are never negative."""

from dataclasses import dataclass, field
from typing import Literal

from fairmesh.metrics.units import Unit

Kind = Literal["run", "sweep", "node"]
Urgency = Literal["fine", "look", "act"]
"""Whether somebody must do something: nothing to do; keep an eye on it; somebody must act, or it does not go on."""
SiteState = Literal["at work", "waits", "silent", "unreachable", "unknown", "stopped", "ended", "diverged", "died"]


@dataclass(frozen=True)
class Estimate:
    """A value, and the interval in which the truth is with 95 % probability, where that is known."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Verdict:
    """How a site's model differs from another one.

    Args:
        against: The other model as tables call it, such as "alone" or "fixed weights".
        verdict: "better", "worse" or "unclear".
        text: The same in words, with the interval of the difference.
    """

    against: str
    verdict: Literal["better", "worse", "unclear"]
    text: str


@dataclass(frozen=True)
class Site:
    """One site, as far as it is known here.

    Args:
        name: Its name.
        own: Whether it is the site whose node is shown. Default: False.
        state: What it does, in one word of few; the page has a mark for each. Default: "unknown".
        doing: What it does, in words, such as "training" or "local training: north, round 3". Default: "".
        round: How many rounds it has done. Default: None.
        heard_s_ago: How old its news is, in seconds; None in a simulation. Default: None.
        value: The metric on its test rows. Default: None.
        value_round: The round in which this was measured. Default: None.
        rows: How many test rows it has. Default: None.
        weight: Its share of the weights (lambda). Default: None.
        prior: Its share of the training rows. Default: None.
        alone: The metric of a model that it has trained alone. Default: None.
        fixed: The metric of the model that was trained with fixed weights. Default: None.
        verdicts: How its model differs from others. Default: none.
        uses: Which model it should use, in few words. Default: "".
        bytes_sent: What it has sent to its neighbours, in bytes. Default: None.
        epsilon: The privacy budget that it has spent. Default: None.
        remarks: What else must be known of it, in sentences: broken data, a new key. Default: none.
        claimed: The names of the fields that only the site itself says. Default: none.
    """

    name: str
    own: bool = False
    state: SiteState = "unknown"
    doing: str = ""
    round: int | None = None
    heard_s_ago: float | None = None
    value: Estimate | None = None
    value_round: int | None = None
    rows: int | None = None
    weight: float | None = None
    prior: float | None = None
    alone: Estimate | None = None
    fixed: Estimate | None = None
    verdicts: tuple[Verdict, ...] = ()
    uses: str = ""
    bytes_sent: int | None = None
    epsilon: float | None = None
    remarks: tuple[str, ...] = ()
    claimed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Edge:
    """A connection between two sites.

    Args:
        ends: The two sites.
        connected: Whether it is open; None if that is not known here, or if it is within a simulation. Default: None.
        bytes_out: What went from the first to the second, in bytes; None if not known. Default: None.
        bytes_in: And back. Default: None.
    """

    ends: tuple[int, int]
    connected: bool | None = None
    bytes_out: int | None = None
    bytes_in: int | None = None


@dataclass(frozen=True)
class Wait:
    """One site waits for another one's message.

    Args:
        site: Who waits.
        awaited: For whom.
        seconds: For how long.
        seen: Whether the node that is shown sees it itself; otherwise it is what `site` says. Default: True.
    """

    site: int
    awaited: int
    seconds: float
    seen: bool = True


@dataclass(frozen=True)
class Missing:
    """Sites whose announcements a node waits for outside the rounds.

    Args:
        sites: The sites.
        seconds: For how long.
    """

    sites: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Refusal:
    """One site refuses another one's messages.

    Args:
        by: Who refuses.
        site: Whose messages.
        reason: Why, in words of `by`.
        seconds: Since when.
        other_end: What the other end says about it.
        times: How many messages were refused here; None of other sites. Default: None.
    """

    by: int
    site: int
    reason: str
    seconds: float
    other_end: str
    times: int | None = None


@dataclass(frozen=True)
class Vote:
    """What sites vote for, such as "remove east"."""

    decision: str
    voters: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    """A metric over the rounds of `Curves`; None where it is not defined. Low and high are those of the replicas; empty
    if there is only one."""

    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Curves:
    """How a metric went on, at some of the measured rounds: at most 400 of them, always with the last one.

    Args:
        rounds: The rounds.
        worst: The worst site in each round. Of a node, the worst that it has heard of.
        mean: The mean over the sites.
        sites: One for each of `View.sites`; empty if it is not known.
    """

    rounds: tuple[int, ...] = ()
    worst: Curve = Curve(())
    mean: Curve = Curve(())
    sites: tuple[Curve, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One algorithm of a sweep.

    Args:
        name: What it differs in from the others, such as "step_size = 0.1".
        curves: How it went on.
        worst: The worst site at the end of them, over its replicas. Default: None.
        mean: The mean over sites. Default: None.
        diverged: How many of its replicas have diverged. Default: 0.
        replicas: How many there are. Default: 1.
        shown: Whether the rest of the view is about this one: the best so far. Default: False.
    """

    name: str
    curves: Curves
    worst: Estimate | None = None
    mean: Estimate | None = None
    diverged: int = 0
    replicas: int = 1
    shown: bool = False


@dataclass(frozen=True)
class Phase:
    """Work outside the common rounds, such as sites that train alone.

    Args:
        name: What it is, such as "finding reference losses".
        done: How much of it is done. Default: None.
        of: Of how much. Default: None.
    """

    name: str
    done: int | None = None
    of: int | None = None


@dataclass(frozen=True)
class Privacy:
    """What has been spent of a privacy budget.

    Args:
        epsilon: At this site, or the most at any site of a simulation; None if it is not known yet.
        budget: What may be spent.
        delta: The delta of both.
        unit: What is protected: "sample" or such as "patient". Default: "".
        sentences: What it covers and what not. Default: none.
    """

    epsilon: float | None
    budget: float
    delta: float
    unit: str = ""
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """What was sent.

    Args:
        whose: Whose bytes these are: "this site", or "the busiest site" of a simulation, where they are counted as
            a deployment would send them.
        sent: The payload of messages to neighbours, in bytes. Default: None.
        received: The same of messages from neighbours; None in a simulation. Default: None.
        on_the_wire: All bytes that went out, with overhead; None in a simulation. Default: None.
        total: What all sites together have sent; None if not known. Default: None.
        per_s: Payload per second, recently. Default: None.
    """

    whose: str
    sent: int | None = None
    received: int | None = None
    on_the_wire: int | None = None
    total: int | None = None
    per_s: float | None = None


@dataclass(frozen=True)
class Line:
    """A line of a log.

    Args:
        time: When it was written, by the clock there, such as "2026-05-04T12:00:00Z".
        level: "info", "warning" or "error".
        text: What it says.
    """

    time: str
    level: str
    text: str


@dataclass(frozen=True)
class View:
    """All that is shown at one moment.

    Args:
        kind: What is shown.
        title: The name of the run's folder, or of the mesh.
        state: One of the states of a node (`mesh/node/life.py`) or of a run (`watch/now.py`), such as "training".
        sentence: What to know and what to do now, in one sentence.
        urgency: Whether somebody must do something.
        seen_at: When this view was made, by the clock of this machine, in seconds since the epoch.
        news_at: When the files that it was made of were last written, by the same clock; None if there are none. Show
            `age_s` instead, which is never negative.
        live: Whether something runs that will write news. Default: False.
        seen_from: The site whose node is shown; "" for a run. Default: "".
        algorithm: Its name. Default: "".
        round: How many rounds are done. Default: 0.
        rounds: Of how many. Default: 0.
        rounds_per_s: How fast, over the last minutes; None if no round was done. Default: None.
        seconds_left: Until the last round; None while that is not known. Default: None.
        phase: Work outside the rounds. Default: None.
        metric: What sites are judged by, and how its numbers are shown; None before it is known. Default: None.
        higher_is_better: Whether a larger value of the metric is better. Default: True.
        judged_on: "test", or "train" if no site has test rows. Default: "test".
        sites: The sites. Default: none.
        order: Positions of all sites in the order in which they need attention. Default: none.
        worst: The worst site now. Default: None.
        worst_site: Its position. Default: None.
        mean: The mean over the sites. Default: None.
        edges: Who is connected with whom. Default: none.
        server: Whether sites talk to a server instead of each other. Default: False.
        waits: Who waits for whom. Default: none.
        chain: For whom this node waits, for whom that one waits, and so on; the last is where to look. Default: none.
        missing: Whom this node waits for outside the rounds. Default: None.
        quiet: Whether something that runs has written nothing for longer than it should. Default: False.
        curves: How the metric went on. Default: none.
        variants: The algorithms of a sweep. Default: none.
        replicas: How many replicas the numbers are means over. Default: 1.
        privacy: What was spent; None without privacy. Default: None.
        traffic: What was sent. Default: None.
        refusals: Whose messages are refused. Default: none.
        votes: What sites vote for. Default: none.
        log: The log's last lines, oldest first. Default: none.
        refused: Those of them, and older ones, that say what was refused and from whom. Default: none.
        advice: What to do with what a finished run has made. Default: "".
        says: What else to know or do, most important first, in sentences. Default: none.
        notes: What a reader must know about the numbers. Default: none.
        removed: Sites that were voted out. Default: none.
        pending: Whether more will be known in a moment: the report of a finished run is being read. Default: False.
    """

    kind: Kind
    title: str
    state: str
    sentence: str
    urgency: Urgency
    seen_at: float
    news_at: float | None
    live: bool = False
    seen_from: str = ""
    algorithm: str = ""
    round: int = 0
    rounds: int = 0
    rounds_per_s: float | None = None
    seconds_left: float | None = None
    phase: Phase | None = None
    metric: Unit | None = None
    higher_is_better: bool = True
    judged_on: str = "test"
    sites: tuple[Site, ...] = ()
    order: tuple[int, ...] = ()
    worst: Estimate | None = None
    worst_site: int | None = None
    mean: Estimate | None = None
    edges: tuple[Edge, ...] = ()
    server: bool = False
    waits: tuple[Wait, ...] = ()
    chain: tuple[int, ...] = ()
    missing: Missing | None = None
    quiet: bool = False
    curves: Curves = field(default_factory=Curves)
    variants: tuple[Variant, ...] = ()
    replicas: int = 1
    privacy: Privacy | None = None
    traffic: Traffic | None = None
    refusals: tuple[Refusal, ...] = ()
    votes: tuple[Vote, ...] = ()
    log: tuple[Line, ...] = ()
    refused: tuple[Line, ...] = ()
    advice: str = ""
    says: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    pending: bool = False

    @property
    def age_s(self) -> float | None:
        """How old the news was when this view was made, in seconds."""
        return None if self.news_at is None else max(0.0, self.seen_at - self.news_at)
