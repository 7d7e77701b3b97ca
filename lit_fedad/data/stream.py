"""Training images that arrive in stages, and the rounds in which clients hold them."""

import itertools
from collections.abc import Sequence
from typing import get_args

from torch.utils.data import Dataset

from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.partition import Schedule

_FINAL_TURNS = 10  # global rounds after which stages that come again are evaluated


class Timetable:
    """Rounds in which clients hold each of their stages; `StreamDataModule` has the rules.

    Args:
        lengths: Number of stages of every client.
        rounds: Training rounds of the experiment.
        schedule: As in `StreamDataModule`.

    Raises:
        UserError: If there is no such schedule, or a client has more stages than there are rounds.
    """

    def __init__(self, lengths: Sequence[int], rounds: int, schedule: Schedule = "stage_major") -> None:
        self.lengths, self.rounds, self.schedule = lengths, rounds, schedule
        if schedule not in get_args(Schedule):
            raise UserError(f"partition schedule={schedule}: give {' or '.join(get_args(Schedule))}")
        stages = max(lengths)
        if rounds < stages:
            raise UserError(
                f"rounds={rounds}, but images come in {stages} stage{'s' * (stages > 1)}: give at least as many rounds"
            )
        if schedule == "stage_major":
            self.stage_rounds = [
                [round] for round in range(1, rounds + 1) if self.stages(round) != self.stages(round + 1)
            ]
        else:
            end = rounds // stages * stages
            start = max(end - _FINAL_TURNS * stages, 0)
            self.stage_rounds = [
                list(range(start + stage, end + 1, stages)) for stage in range(1, stages + 1)
            ]

    @property
    def milestones(self) -> frozenset[int]:
        """All rounds after which a stage is evaluated."""
        return frozenset(itertools.chain.from_iterable(self.stage_rounds))

    def stage(self, client: int, round: int) -> int:
        """Returns the number, from 0, of a client's stage in a round."""
        num_stages, rounds_before = self.lengths[client], max(round - 1, 0)
        return (
            rounds_before % num_stages
            if self.schedule == "literal"
            else rounds_before * num_stages // self.rounds
        )

    def stages(self, round: int) -> list[int]:
        """Returns the number of each client's stage in a round."""
        return [self.stage(client, round) for client in range(len(self.lengths))]


class StreamDataModule(FederatedDataModule):
    """Training images of clients in stages that come one after another, and one test set.

    In set-up exchanges clients hold their first stage. A client with fewer stages than others has longer ones.

    Args:
        train: As in `FederatedDataModule`.
        test: As in `FederatedDataModule`.
        stages: For every client, for each of its stages in order, the indices of its images in ``train``.
        rounds: Training rounds of the experiment.
        schedule: ``"stage_major"``: each stage lasts as many rounds as the others of its client, and never comes
            again. ``"literal"``: all stages come in every global round (GLDP Alg. 1); training and merging one of them
            counts as one of ``rounds``.
        batch_size: As in `FederatedDataModule`.
        eval_batch_size: As in `FederatedDataModule`.

    Attributes:
        stage_rounds: For each stage the rounds after which it is evaluated: the last round of a client's stage; where
            stages come again, those of the last ten global rounds that train it (GLDP Fig. 4).
        milestones: All these rounds.

    Raises:
        UserError: If there is no such schedule, or a client has more stages than there are rounds.
    """

    def __init__(
        self,
        train: Dataset,
        test: Dataset,
        stages: Sequence[Sequence[Sequence[int]]],
        rounds: int,
        schedule: Schedule = "stage_major",
        batch_size: int = 10,
        eval_batch_size: int = 32,
    ) -> None:
        union = [[index for stage in client_stages for index in stage] for client_stages in stages]
        super().__init__(train, test, union, batch_size, eval_batch_size)
        self.by_stage, self.rounds, self.schedule = stages, rounds, schedule
        self.timetable = Timetable(list(map(len, stages)), rounds, schedule)
        self.stage_rounds, self.milestones = self.timetable.stage_rounds, self.timetable.milestones
        self._current: tuple[list[int], FederatedDataModule] | None = None

    def stage(self, client: int, round: int) -> int:
        """Returns the number, from 0, of a client's stage in a round."""
        return self.timetable.stage(client, round)

    def at(self, round: int) -> FederatedDataModule:
        """Returns the data that the clients hold in a round; its ``stages`` are their stages."""
        stages = self.timetable.stages(round)
        if self._current is None or self._current[0] != stages:
            current = [
                client_stages[stage] for client_stages, stage in zip(self.by_stage, stages, strict=True)
            ]
            sizes = self.batch_size, self.eval_batch_size
            self._current = stages, FederatedDataModule(self.train, self.test, current, *sizes, stages)
        return self._current[1]


class LastStages(FederatedDataModule):
    """Training images of clients after the end of all stages, where each client holds its last one."""

    def __init__(
        self,
        train: Dataset,
        test: Dataset,
        stages: Sequence[Sequence[Sequence[int]]],
        batch_size: int = 10,
        eval_batch_size: int = 32,
    ) -> None:
        union = [[index for stage in client_stages for index in stage] for client_stages in stages]
        super().__init__(train, test, union, batch_size, eval_batch_size)
        last = [client_stages[-1] for client_stages in stages]
        numbers = [len(client_stages) - 1 for client_stages in stages]
        self._current = FederatedDataModule(train, test, last, batch_size, eval_batch_size, numbers)

    def at(self, round: int) -> FederatedDataModule:
        """Returns the data of the last stages, whatever the round."""
        return self._current
