"""How often there is time to think: observing steps and choosing K take about one percent of the time of steps."""

from __future__ import annotations

_SHARE = 0.0015  # of the time of plain steps, for choices and for observations each: a third of a percent in all
_HASTE = 3.0  # times that where something is drafted, or little is known: there a wrong choice is dear
_CHOICES_SAVED, _OBSERVATIONS_SAVED = 4, 16  # that may be made at once, first of all in the first steps of an engine


class DecisionBudget:
    """Two accounts: every step pays its share into them, every observation and every choice takes out what it costs.

    Where steps are long there is always enough in them. Where a step takes no longer than a few choices do, most steps
    go by unobserved, and a choice stands for longer.

    Args:
        choice_seconds: what one choice takes.
        observation_seconds: what one observation takes.

    Attributes:
        is_hasty: whether to learn and choose more often than while all decode plainly.
        num_choices: made so far.
        num_observations: made so far.

    """

    def __init__(self, choice_seconds: float, observation_seconds: float) -> None:
        self.is_hasty = True
        self.num_choices = self.num_observations = 0
        self._choice_seconds, self._observation_seconds = choice_seconds, observation_seconds
        self._most_for_choices = self._for_choices = _CHOICES_SAVED * choice_seconds
        self._most_for_observations = self._for_observations = _OBSERVATIONS_SAVED * observation_seconds

    @property
    def may_choose(self) -> bool:
        """Whether a choice can be paid."""
        return self._for_choices >= self._choice_seconds

    @property
    def may_overdraw(self) -> bool:
        """Whether a choice that should not wait can be made; those that can will wait the longer."""
        return self._for_choices >= self._choice_seconds - self._most_for_choices

    @property
    def may_observe(self) -> bool:
        """Whether an observation can be paid."""
        return self._for_observations >= self._observation_seconds

    def pass_time(self, seconds: float) -> None:
        """Put aside a step's share."""
        share = _SHARE * _HASTE * seconds if self.is_hasty else _SHARE * seconds
        if self._for_choices < self._most_for_choices:
            self._for_choices += share
        if self._for_observations < self._most_for_observations:
            self._for_observations += share

    def choose(self) -> None:
        """Pay for a choice."""
        self._for_choices -= self._choice_seconds
        self.num_choices += 1

    def observe(self) -> None:
        """Pay for an observation."""
        self._for_observations -= self._observation_seconds
        self.num_observations += 1
