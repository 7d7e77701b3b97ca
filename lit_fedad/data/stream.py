"""Training images that come task after task: which of them a client holds in which round."""

from collections.abc import Sequence
from typing import get_args

from torch.utils.data import Dataset

from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.partition import Schedule
from lit_fedad.errors import UserError


class StreamDataModule(FederatedDataModule):
    """Training images dealt to clients and to tasks that come one after another, and one test set.

    In set-up exchanges clients hold their first task. A client with fewer tasks than others has longer ones.

    Args:
        train: As in `FederatedDataModule`.
        test: As in `FederatedDataModule`.
        tasks: For every client, for each of its tasks in order, the indices of its images in ``train``.
        rounds: Training rounds of the experiment.
        schedule: ``"stage_major"``: each task lasts as many rounds as the others of its client, and never comes
            again. ``"literal"``: all tasks come in every global round (GLDP, Alg. 1), of which each task's training
            and merging are one of ``rounds``.
        batch_size: As in `FederatedDataModule`.
        eval_batch_size: As in `FederatedDataModule`.

    Attributes:
        milestones: Rounds that are the last of a client's task, where tasks never come again.

    Raises:
        UserError: If there is no such schedule, or a client has more tasks than there are rounds.
    """

    def __init__(
        self,
        train: Dataset,
        test: Dataset,
        tasks: Sequence[Sequence[Sequence[int]]],
        rounds: int,
        schedule: Schedule = "stage_major",
        batch_size: int = 10,
        eval_batch_size: int = 32,
    ) -> None:
        union = [[index for task in own for index in task] for own in tasks]
        super().__init__(train, test, union, batch_size, eval_batch_size)
        self.tasks, self.rounds, self.schedule = tasks, rounds, schedule
        if schedule not in get_args(Schedule):
            raise UserError(f"partition schedule={schedule}: give {' or '.join(get_args(Schedule))}")
        longest = max(range(len(tasks)), key=lambda client: len(tasks[client]))
        if rounds < len(tasks[longest]):
            raise UserError(
                f"rounds={rounds}, but client {longest} has {len(tasks[longest])} tasks: give at least as many rounds"
            )
        if schedule == "stage_major":
            self.milestones = frozenset(
                round
                for round in range(1, rounds + 1)
                if any(self.stage(c, round) != self.stage(c, round + 1) for c in range(len(tasks)))
            )
        self._now: tuple[list[int], FederatedDataModule] | None = None

    def stage(self, client: int, round: int) -> int:
        """Which of its tasks, from 0, a client is at in a round."""
        tasks, played = len(self.tasks[client]), max(round - 1, 0)
        return played % tasks if self.schedule == "literal" else played * tasks // self.rounds

    def at(self, round: int) -> FederatedDataModule:
        """What the clients hold in a round; ``stages`` says which of their tasks that is."""
        stages = [self.stage(client, round) for client in range(len(self.tasks))]
        if self._now is None or self._now[0] != stages:
            held = [own[stage] for own, stage in zip(self.tasks, stages, strict=True)]
            now = _Held(self.train, self.test, held, self.batch_size, self.eval_batch_size)
            now.held = dict(enumerate(stages))
            self._now = stages, now
        return self._now[1]


class _Held(FederatedDataModule):
    """What the clients hold in one round."""

    held: dict[int, int]

    @property
    def stages(self) -> dict[int, int]:
        return self.held
