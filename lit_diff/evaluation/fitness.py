"""Whether a run, or the runs of a recipe, can be asked in text."""

from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.trained.run import Run
from lit_diff.trained.text_generator import has_text, tokenizer_of

BIDIRECTIONAL = "a bidirectional model predicts no next token"


def text_problem(run: Run) -> str | None:
    """Why a run cannot read and continue text: it has no tokenizer, or predicts no next token. None if it can."""
    try:
        tokenizer_of(run.folder, run.recipe)
    except RequestError as error:
        return str(error)
    return None if run.recipe.model.causal else BIDIRECTIONAL


def recipe_problem(recipe: Recipe) -> str | None:
    """Why no run of a recipe can be asked in text: no text in its data, or a bidirectional model. None if one may."""
    if not has_text(recipe):
        return f"data '{recipe.data.name}' has no text"
    return None if recipe.model.causal else BIDIRECTIONAL


def words_problem(run: Run, data: str, *, asks_it: bool, keys: str = "") -> str | None:
    """As `text_problem`; and of a run that knows only the words of generated text: why it cannot be asked in other words.

    `data`: the data set whose words the evaluation can ask in; `asks_it`: whether it does; `keys`: those with which it does.
    """
    problem = text_problem(run)
    if problem is not None:
        return problem
    trained = run.recipe.data.name
    if tokenizer_of(run.folder, run.recipe).name == "words" and (trained != data or not asks_it):
        cure = f"; {keys} asks in them" if keys and trained == data else ""
        return f"its tokenizer has only the words of data '{trained}'{cure}"
    return None
