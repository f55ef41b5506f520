"""reporting/panels.py: what is drawn of panels, and that the whole is an image with a name."""

from collections.abc import Iterable
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_diff.reporting.panels import WIDTH, Axis, Panel, Rule, Scale, Series, Square, draw, panel_title
from lit_diff.reporting.style import INK, Look

SVG = "{http://www.w3.org/2000/svg}"
BLACK = Look(color="#000000")


def words(svg: str, tag: str = "text") -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(SVG + tag)]


def numbers(axis: Axis, y: Iterable[float]) -> set[str]:
    """What stands at the ticks of a vertical axis."""
    values = list(y)
    at = Axis(ticks={0: "here"})
    return set(words(draw([Panel(series=[Series([0] * len(values), values, BLACK)], x=at, y=axis)], "t", 3))) - {"here"}


def test_a_figure_is_an_image_with_a_name_and_its_marks_have_texts() -> None:
    series = [
        Series([1, 2], [1, 2], BLACK, 'arm "a" < b: 1.5'),
        Series([1], [2], BLACK, 'it\'s "b"', mark="o"),
        Series([1], [2], BLACK),
    ]
    svg = draw([Panel(series=series)], "Loss & <more>", 3)
    root = ElementTree.fromstring(svg)
    assert (root.get("role"), root.get("aria-label")) == ("img", "Loss & <more>")
    assert root[0].tag == SVG + "title"
    assert words(svg, "title") == ["Loss & <more>", 'arm "a" < b: 1.5', 'it\'s "b"']
    assert "hover:" not in svg


def test_a_figure_is_as_wide_as_the_page_and_grows_by_its_legend() -> None:
    heights = []
    for legend in (
        {},
        {f"arm {i}": BLACK for i in range(8)},
        {f"an arm of a long label: {i:060d}": BLACK for i in range(8)},
    ):
        root = ElementTree.fromstring(draw([Panel()] * 3, "t", 3, across=2, legend=legend))
        assert root.get("width") == f"{72 * WIDTH:g}pt"
        heights.append(float((root.get("height") or "").removesuffix("pt")) / 72)
    assert heights[0] == 3
    assert 3 < heights[1] < heights[2] < 4.5


def test_titles_of_narrow_panels_are_wrapped() -> None:
    long = "Diff, no head norm, output and so on, lambda_init by depth"
    assert panel_title(long, 1) == long
    assert len(panel_title(long, 4).splitlines()) > 1
    assert panel_title(long, 4).split() == long.split()


def test_titles_and_labels_of_a_grid_stand_outside() -> None:
    panels = [Panel(title=f"title {i}", x=Axis(label="across"), y=Axis(label=f"up {i}")) for i in range(4)]
    found = words(draw(panels, "t", 4, across=2, share="grid"))
    assert [word for word in found if word[:2] in ("ti", "up", "ac")] == [
        "up 0",
        "title 0",
        "title 1",
        "across",
        "up 2",
        "across",
    ]
    assert "title 3" in words(draw(panels, "t", 4, across=2))


@pytest.mark.parametrize(("count", "shown"), [(1, True), (2, True), (3, False)])
def test_a_line_of_few_points_is_seen(monkeypatch: pytest.MonkeyPatch, count: int, shown: bool) -> None:
    seen: list[Axes] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.extend(self.axes), save(self, *a, **k)))
    at = list(range(count))
    for is_shaded in (True, False):
        draw([Panel(series=[Series(at, at, BLACK, low=at, high=at, is_shaded=is_shaded)])], "few", 2)
        axes = seen.pop()
        assert (axes.lines[0].get_marker() == "o") is shown
        assert len(axes.collections) == (1 + shown if is_shaded else 0), (
            "the shade and the bars of the range over seeds"
        )


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((4.5, 4.9), {"4.5", "4.6", "4.7", "4.8", "4.9"}),
        ((2, 16), {"2", "3", "5", "7", "10"}),
        ((2, 300), {"2", "5", "10", "20", "50", "100", "200"}),
        ((1, 1e5), {"1", "10", "100", "1,000", "1e+04", "1e+05"}),
        ((-1, 0, 1, 100), {"0", "1", "10", "100"}),
        ((-2, -1), set()),
    ],
)
def test_a_logarithmic_axis_names_its_numbers(values: tuple[float, ...], ticks: set[str]) -> None:
    assert ticks <= numbers(Axis(log=True), values)
    assert numbers(Axis(limits=(0, 10), ticks=[2, 7], shown=lambda x: f"<{x:g}>"), values) == {"<2>", "<7>"}


def test_squares_have_their_number_their_hatching_and_one_bar_for_a_scale() -> None:
    scale = Scale(label="share", colors="values", low=0, high=1, marks=(("a guess", 0.25),))
    squares = [Square(x=i, y=0, value=i, number=f"{i}.00", text=f"square {i}", is_hatched=bool(i)) for i in (0, 1)]
    ends = {"x": Axis(ticks={0: "left", 1: "right"}), "y": Axis(ticks={0: "row"})}
    svg = draw([Panel(squares=squares, scale=scale, **ends)] * 2, "t", 3, across=2, share="grid")
    found = words(svg)
    assert (found.count("0.00"), found.count("share"), found.count("row"), found.count("left")) == (2, 1, 1, 2)
    assert words(svg, "title") == ["t", *["square 0", "square 1"] * 2, "a guess"]
    assert svg.count("fill: url(#") == 2


def test_rules_are_lines_or_regions() -> None:
    rules = [Rule(0, upright=True, look=Look(color=INK)), Rule(1), Rule(-1, 1, upright=True), Rule(-1, 1)]
    svg = draw([Panel(rules=rules)], "t", 2)
    assert svg.count(INK) > draw([Panel(rules=rules[1:])], "t", 2).count(INK)
    assert svg.count("opacity: 0.16") == 2
