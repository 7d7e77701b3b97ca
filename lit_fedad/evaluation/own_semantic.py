"""Semantic anomalies among images of clients' own, which stay where they are: counts of scores cross."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_fedad.contracts import Client, Free, Message, MessageSpec, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.own_images import IMAGE_BINS, MOST_IMAGES, OwnImagesEvaluator
from lit_fedad.evaluation.semantic import SemanticEvaluator, semantic_names
from lit_fedad.federation.question import Question
from lit_fedad.metrics.base import concatenated
from lit_fedad.metrics.federated import Summary, summarise
from lit_fedad.metrics.semantic import SemanticMetrics

_UNDECIDED = 2


class OwnSemanticScores(Question[SemanticMetrics]):
    """The question for a client's scores of its own test images, counted by set of anomalies, decision and bin.

    Args:
        anomalies: Names of the sets of anomalies.
        judge: Scores the client on its test images; None on the server, which only reads answers.
    """

    name = "scores"

    def __init__(self, anomalies: Sequence[str], judge: SemanticEvaluator | None = None) -> None:
        self.anomalies, self.judge = tuple(anomalies), judge

    def __call__(self, client: Client, number: int) -> SemanticMetrics:
        """Scores the client on its own test images."""
        assert self.judge is not None
        return self.judge.score(client, number)[number]

    def pack(self, answer: SemanticMetrics) -> Message:
        """Returns set, decision, bin and count of every combination that occurs."""
        decisions = concatenated(answer.decisions).nan_to_num(_UNDECIDED)
        bins = IMAGE_BINS.index(concatenated(answer.scores))
        rows = torch.stack([concatenated(answer.sets).long(), decisions.long(), bins.long()], dim=1)
        found, counts = rows.unique(dim=0, return_counts=True)
        sets, decided, binned = found.unbind(dim=1)
        return {"sets": sets, "decisions": decided, "bins": binned, "counts": counts}

    def spec(self) -> MessageSpec:
        """Declares four lists of one length."""
        combinations = (len(self.anomalies) + 1) * (_UNDECIDED + 1) * IMAGE_BINS.count
        rows = Free("rows", min(combinations, MOST_IMAGES))
        highest = {"sets": len(self.anomalies), "decisions": _UNDECIDED, "bins": IMAGE_BINS.count - 1}
        form: MessageSpec = {
            name: TensorSpec((rows,), torch.int64, low=0, high=high) for name, high in highest.items()
        }
        return {**form, "counts": TensorSpec((rows,), torch.int64, low=1, high=MOST_IMAGES, counted=True)}

    def unpack(self, message: Message) -> SemanticMetrics:
        """Builds the metric state; every score is the largest one of its bin.

        Raises:
            UserError: If more images were scored than any client has.
        """
        counts = message["counts"]
        if int(counts.sum()) > MOST_IMAGES:
            raise UserError(f"the client scored more than {MOST_IMAGES} images")
        decided = torch.tensor([0.0, 1.0, torch.nan])[message["decisions"]]
        metrics = SemanticMetrics(self.anomalies)
        metrics.scores.append(IMAGE_BINS.upper(message["bins"]).repeat_interleave(counts))
        metrics.sets.append(message["sets"].float().repeat_interleave(counts))
        metrics.decisions.append(decided.repeat_interleave(counts))
        return metrics


class OwnSemanticEvaluator(OwnImagesEvaluator):
    """An evaluator of every client against the sets of anomalies among its own test images.

    Args:
        question: The question for metric states.
    """

    def __init__(self, question: OwnSemanticScores) -> None:
        super().__init__(question)
        self.metrics = semantic_names(question.anomalies)

    def summarise(self, states: dict[int, SemanticMetrics]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        return summarise(states)
