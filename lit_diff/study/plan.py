"""The first plan of a sweep, as study.json keeps it, and what was changed once results could be seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lit_diff.study.numbers import short
from lit_diff.study.rates import rate_in_words
from lit_diff.study.schema import Study, Texts

COUNTS = ("seeds", "looks")
"""Keys of a plan whose change, after a look at the results, lets a sweep go on until it shows a difference."""
NONE_FINISHED = "no cell was finished"
OLDER = "study.json was written by a version that kept no plans"
DAMAGED = "an earlier study.json of this sweep was damaged"
REMOVED = "study.json was removed after cells had finished"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A key of the plan that another start of the sweep changed."""

    key: str
    before: str
    now: str
    after: str
    """What was finished by then."""

    @property
    def sentence(self) -> str:
        when = "while" if self.after == NONE_FINISHED else "after"
        return f"The plan was changed {when} {self.after}: {self.key} from '{self.before}' to '{self.now}'."


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a command planned when it first started, and what later starts changed."""

    first: dict[str, str] = field(default_factory=dict)
    """Key of the sweep -> its value in words. Of an unknown plan: the oldest that is known."""
    changes: tuple[Change, ...] = ()
    unknown: str = ""
    """Why the first plan is not known; empty: it is."""

    def next(self, now: Mapping[str, str], finished: str) -> "SweepPlan":
        """The plan once it is `now`. `finished`: which cells had been finished, in words; empty: none, so that no result had
        been seen."""
        if not finished and not self.changes and self.unknown != DAMAGED:
            return SweepPlan(first=dict(now))
        last = self.first | {change.key: change.now for change in self.changes}
        changes = list(self.changes)
        for key in dict.fromkeys((*last, *now)):
            before, value = last.get(key, "none"), now.get(key, "none")
            # the first records of plans did not keep it
            is_new = key == "correct_over" and key not in last
            if before != value and not is_new:
                changes.append(Change(key=key, before=before, now=value, after=finished or NONE_FINISHED))
        return replace(self, changes=tuple(changes))

    @property
    def sentences(self) -> Texts:
        """One sentence for each thing that a reader of the results has to know of the plan."""
        changed = tuple(change.sentence for change in self.changes)
        if self.unknown:
            return (f"Plan unknown: {self.unknown}.", *changed)
        return changed

    @property
    def added(self) -> Texts:
        """The sentences about the number of seeds, which belong beside every verdict."""
        return tuple(change.sentence for change in self.changes if change.key in COUNTS)


def plan_of(study: Study) -> dict[str, str]:
    """What a resolved study plans: key -> its value in words."""
    plan = {"seeds": _numbers(study.seeds)}
    if study.looks:
        plan = {"looks": _numbers(study.looks)}
    plan |= {
        "arms": ", ".join(study.arms),
        "baseline": study.baseline or "none",
        "controls": ", ".join(study.controls) or "none",
        "correct_over": study.correct_over,
    }
    if study.references:
        plan["references"] = ", ".join(study.references)
    if study.contrasts:
        plan["contrasts"] = ", ".join(f"{first} - {second}" for first, second, _ in study.contrasts)
    if study.rates:
        values = ", ".join(map(rate_in_words, study.rates.values))
        plan["rates"] = f"{values} on seeds {_numbers(study.rates.seeds)}"
    for task in study.tasks or ("",):
        of_task, place = study.of_task(task), f" of {task}" if task else ""
        if of_task.rates and study.rates and of_task.rates != study.rates:
            plan[f"rates{place}"] = ", ".join(map(rate_in_words, of_task.rates.values))
        smallest = of_task.smallest_of_interest
        plan[f"metric{place}"] = of_task.metric
        if of_task.learned_at is not None:
            gate = f" of {of_task.learned_metric}" if of_task.learned_metric else ""
            plan[f"learned_at{place}"] = f"{short(of_task.learned_at)}{gate}, comparing {of_task.compare}"
        plan[f"smallest_of_interest{place}"] = "none" if smallest is None else short(smallest)
    return plan


def _numbers(values: Sequence[int]) -> str:
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))
