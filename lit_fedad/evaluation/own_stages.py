"""The question for metric states of each stage, where the products of a client's own images come in stages."""

from __future__ import annotations

from lit_fedad.contracts import Client, Message, MessageSpec
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator, Judged, StageMetrics
from lit_fedad.evaluation.own_images import (
    OwnImagesEvaluator,
    of_images,
    packed_states,
    states_spec,
    unpacked_states,
)
from lit_fedad.federation.evaluator import Evaluation, Interview
from lit_fedad.federation.question import Question
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.base import union


class OwnStageScores(Question[list[AnomalyMetrics]]):
    """The question for a client's metric states on its own test images, one for each of its stages so far.

    Args:
        stages: Most stages of a client.
        judge: Scores the client on its test images; None on the server, which only reads answers.
        pro_limit: Largest false positive rate of PRO.
    """

    name = "scores"

    def __init__(
        self, stages: int, judge: AnomalyStreamEvaluator | None = None, pro_limit: float = 0.3
    ) -> None:
        self.stages, self.judge, self.pro_limit = stages, judge, pro_limit

    def __call__(self, client: Client, number: int) -> list[AnomalyMetrics]:
        """Scores the client on its own test images."""
        assert self.judge is not None
        return self.judge.score(client, number)

    def pack(self, answer: list[AnomalyMetrics]) -> Message:
        """Returns bins and counts, the bins of a stage after those of the stage before."""
        return packed_states(answer)

    def spec(self) -> MessageSpec:
        """Declares ascending bins and their counts."""
        return states_spec(self.stages)

    def unpack(self, message: Message) -> list[AnomalyMetrics]:
        """Builds the metric states of all stages; those that have not come are empty."""
        return unpacked_states(message, self.stages, self.pro_limit)


class OwnStagesEvaluator(OwnImagesEvaluator):
    """An evaluator of every client on its own test images of its stages so far.

    Args:
        question: The question for metric states.
        summary: Computes the metrics.
    """

    def __init__(self, question: OwnStageScores, summary: StageMetrics) -> None:
        super().__init__(question)
        self.summary, self.metrics = summary, summary.names

    def evaluate(self, interview: Interview, round: int) -> Evaluation | None:
        """Computes the metrics after a round."""
        answers = interview.ask(round, self.question)
        if not interview.fabric.is_global_zero:
            return None
        stages = self.summary.timetable.stages(round)
        met = {client: states[: stages[client] + 1] for client, states in answers.items()}
        if not all(state.pixel for states in met.values() for state in states):
            met = {client: [of_images(state) for state in states] for client, states in met.items()}
        now = {
            client: Judged(union(states), [float(own.compute_local()["i_auroc"]) for own in states], {})
            for client, states in met.items()
        }
        return Evaluation(self.summary.summarise(now, round, interview.history))
