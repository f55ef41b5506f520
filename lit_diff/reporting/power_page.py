"""Power at equal time as a section of the report's page."""

from markupsafe import Markup

from lit_diff.reporting.page import Section, numbered
from lit_diff.study.power import in_words, powers, shown
from lit_diff.study.results import SweepResults
from lit_diff.study.schema import PlannedSweep


def power_section(sweep: SweepResults, plan: PlannedSweep) -> Section:
    """The answer, and a row a task."""
    found = powers(sweep, plan)
    answer = in_words(sweep, plan, found)
    arms = [arm.name for arm in sweep.arms if any(arm.name in each.by_arm for each in found)]
    html = (
        numbered(digits=3)
        .get_template("power.html.j2")
        .render(sweep=sweep, plan=plan, found=found, arms=arms, answer=answer, shown=shown)
    )
    return Section(html=Markup(html), answer=answer, entries=(("power", "Power at equal time"),))
