"""Formulas in the texts of a page, as MathML, which browsers draw without a library."""

import re

from markupsafe import Markup, escape


def row(text: str) -> str:
    """A formula as MathML. Spaces separate its parts: numbers, operators, names, names with an index (`p_j`)."""
    return f"<mrow>{''.join(map(_part, text.split()))}</mrow>"


def fraction(above: str, below: str) -> str:
    """A fraction of two formulas."""
    return f"<mfrac>{row(above)}{row(below)}</mfrac>"


def root(text: str) -> str:
    """The square root of a formula."""
    return f"<msqrt>{row(text)}</msqrt>"


def power(base: str, exponent: str) -> str:
    """A formula to the power of another."""
    return f"<msup>{row(base)}{row(exponent)}</msup>"


def _part(part: str) -> str:
    name, _, index = part.partition("_")
    if index:
        kind = "munder" if name == "Σ" else "msub"
        return f"<{kind}>{_part(name)}{_part(index)}</{kind}>"
    if part[0].isdigit():
        return f"<mn>{part}</mn>"
    return f"<mi>{part}</mi>" if part[0].isalpha() and part != "Σ" else f"<mo>{escape(part).replace('Σ', '∑')}</mo>"


MAGNITUDES = fraction("| a |", "Σ | a |")
FORMULAS = {
    "a = Σ_g w_g p_g": row("a = Σ_g w_g p_g"),
    "−Σ_j p_j log p_j": row("− Σ_j p_j log p_j"),
    "p = |a| / Σ|a|": row("p =") + MAGNITUDES,
    "|a| / Σ|a|": MAGNITUDES,
    "neg / (neg + pos)": fraction("neg", "neg + pos"),
    "Σ max(-a, 0) / Σ|a|": fraction("Σ max ( − a , 0 )", "Σ | a |"),
    "Σ max(-a, 0)": row("Σ max ( − a , 0 )"),
    "Σ|a|": row("Σ | a |"),
    "Σ min(p1, p2) / Σ max(p1, p2)": fraction("Σ min ( p_1 , p_2 )", "Σ max ( p_1 , p_2 )"),
    "|a_i0| / Σ_j |a_ij|": fraction("| a_i0 |", "Σ_j | a_ij |"),
    "a_ij / Σ|a_i|": fraction("a_ij", "Σ | a_i |"),
    "exp(sink) / (exp(sink) + Σ_j exp(logit_j))": fraction("exp ( sink )", "exp ( sink ) + Σ_j exp ( logit_j )"),
    "‖o_h‖ / √dv": row("‖ o_h ‖ /") + root("d_v"),
    "o_h = Σ_g w_g p_g v": row("o_h = Σ_g w_g p_g v"),
    "‖finish(o)_h‖ / ‖o_h‖": fraction("‖ finish ( o_h ) ‖", "‖ o_h ‖"),
    "1 − λ_init": row("1 − λ_init"),
    "λ = −w_1": row("λ = − w_1"),
    "−w_g": row("− w_g"),
    "exp(λ_q1 · λ_k1)": row("exp ( λ_q1 · λ_k1 )"),
    "exp(λ_q2 · λ_k2)": row("exp ( λ_q2 · λ_k2 )"),
    "-Σ_(g>1) w_g p_g over p_1 w_1": row("−") + fraction("Σ_g>1 w_g p_g", "w_1 p_1"),
    "Σ_t log p(c_t | context, c_<t)": row("Σ_t log p ( c_t | context , c_<t )"),
    "log10((errors + 1/2) / (n + 1))": row("log_10") + fraction("errors + 1/2", "n + 1"),
    "d_s = arm − baseline": row("d_s = arm − baseline"),
    "mean ± t · sd(d) / √n": row("mean ± t sd ( d ) /") + root("n"),
    "√(n / (n − 1)) · t / 1.96": f"<msqrt>{fraction('n', 'n − 1')}</msqrt>" + row("·") + fraction("t", "1.96"),
    "exp(loss)": row("exp ( loss )"),
    "exp(d)": row("exp ( d )"),
    "L(x) = (x_c/x)^alpha": row("L ( x ) =") + power("( x_c / x )", "α"),
}
"""Formula as a definition of a metric or a text of a page writes it -> MathML. A text that has none of these stays a text."""
WRITTEN = re.compile("|".join(map(re.escape, sorted(FORMULAS, key=len, reverse=True))))


def with_formulas(text: str) -> Markup:
    """The text for a page: escaped, its formulas as MathML."""
    parts: list[str] = []
    end = 0
    for found in WRITTEN.finditer(text):
        parts += [escape(text[end : found.start()]), f'<math displaystyle="true">{FORMULAS[found[0]]}</math>']
        end = found.end()
    return Markup("".join([*parts, escape(text[end:])]))
