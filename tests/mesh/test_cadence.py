"""How often a site tells the others about itself."""

from fairmesh.mesh.node.watching import Cadence


def moments(seconds: int, matters, rest, sites: int = 3, bytes_per_s: float = 1e9) -> list[int]:
    """Returns when a site tells others about itself that looks once per second at what there is to tell."""
    now = [0.0]
    cadence, told = Cadence(lambda: now[0]), []
    for second in range(seconds):
        now[0] = float(second)
        if cadence.due(matters(second), rest(second), sites, bytes_per_s) is not None:
            told.append(second)
    return told


def same(second: int) -> int:
    return 0


def each(second: int) -> int:
    return second


def test_cadence_tells_ever_more_rarely_while_nothing_changes():
    assert moments(600, same, same) == [0, 15, 45, 105, 225, 345, 465, 585]


def test_cadence_tells_what_matters_in_the_next_second_after_any_silence():
    assert moments(303, lambda second: second >= 300, same)[-1] == 300
    assert moments(20, each, same, bytes_per_s=0.0) == list(range(20))


def test_cadence_tells_rounds_as_often_as_the_budget_allows():
    assert moments(20, same, each) == list(range(20))
    assert moments(200, same, each, bytes_per_s=10.0) == [0, 15, 45, 75, 105, 135, 165, 195]  # 2 of 150 bytes in 30 s


def test_cadence_slows_down_with_the_number_of_sites():
    quiet = moments(3000, same, same, sites=100)
    assert quiet[-1] - quiet[-2] == 99 * 150 / 30


def test_cadence_says_when_it_tells_again_and_keeps_to_it():
    now, promised = [0.0], 0.0
    cadence = Cadence(lambda: now[0])
    for second in range(2000):
        now[0] = float(second)
        rest = second // 7 if second < 900 else 0
        again_s = cadence.due(second > 500, rest, 10, 20.0)
        if again_s is not None:
            assert not promised or second <= promised
            promised = second + again_s
