"""A grid of values that the workers of a study try together."""

from collections.abc import Mapping, Sequence

from optuna import Study, samplers
from optuna.trial import FrozenTrial, TrialState


class GridSampler(samplers.GridSampler):
    """Optuna's grid, with one order of its values for all workers.

    Optuna notes the places of values that were tried, in an order drawn by the seed: workers of different seeds would
    repeat some values and never try others.

    Args:
        search_space: Values of each searched key.
    """

    def __init__(self, search_space: Mapping[str, Sequence]) -> None:
        super().__init__(search_space)

    def all_begun(self, study: Study) -> bool:
        """Tells whether every value has been tried or is played by a worker: Optuna would give out the latter again."""
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return set(self._get_unvisited_grid_ids(study)) <= {
            one.system_attrs.get("grid_id") for one in running
        }

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Ends the study after the last value; a trial of given values, such as the default, has no place there."""
        if "grid_id" in trial.system_attrs:
            super().after_trial(study, trial, state, values)
        elif self.is_exhausted(study):
            study.stop()
