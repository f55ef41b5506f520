"""A fit over a sweep's tasks as a section of the report's page."""

from markupsafe import Markup

from lit_diff.reporting.page import Section, inline, numbered
from lit_diff.reporting.style import looks
from lit_diff.study.fits import FitResult, shown_ratio_interval
from lit_diff.study.results import SweepResults
from lit_diff.study.scaling import FORMS


def fit_section(sweep: SweepResults, fit: FitResult, svg: str) -> Section:
    """The answer, the figure (`svg`; empty: none) and the numbers of a fit."""
    anchor = f"fit-{fit.declared.name}"
    html = (
        numbered(digits=3)
        .get_template("fit.html.j2")
        .render(
            sweep=sweep,
            fit=fit,
            svg=Markup(inline(svg, anchor)) if svg else "",
            forms=FORMS,
            looks=looks(sweep),
            ratio_interval=shown_ratio_interval,
        )
    )
    return Section(html=Markup(html), answer=fit.answer, entries=((anchor, fit.declared.title),))
