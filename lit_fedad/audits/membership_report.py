"""How well an attack tells members from others, with intervals and with what chance gives under the same metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from lit_fedad.contracts.randomness import numpy_generator

RATES = {"tpr_at_0.1_percent": 0.001, "tpr_at_1_percent": 0.01}
"""False positive rates at which the true positive rate is reported, by name."""
DRAWS = 400
"""Bootstrap replicates, and permutations of membership."""

Floats = NDArray[np.float64]


class Attacked(NamedTuple):
    """Scores of one client's examples under each attacked model.

    Attributes:
        scores: High for members [J, n]; NaN where there is none.
        members: Whether each model was trained on each example, bool [J, n].
        cells: Cell of each example [n]: within one, members are drawn at random.
    """

    scores: Tensor
    members: Tensor
    cells: Tensor


@dataclass(frozen=True)
class Estimate:
    """A metric, with the ends of its 95 % interval.

    Attributes:
        value: What the attack reached.
        chance: Mean of the metric where membership is permuted within cells.
        chance_high: 97.5 % quantile of the metric there: a value below it may be chance.
    """

    value: float
    low: float
    high: float
    chance: float
    chance_high: float


@dataclass(frozen=True)
class MembershipReport:
    """Success of an attack on several models, each of which was attacked in turn.

    Attributes:
        auc: Area under the ROC curve of all clients and models together.
        tpr: True positive rates of that curve, by the names of `RATES`.
        auc_of_models: Mean and standard deviation over models of the area under their own curve.
        clients: For each client the mean and the deviation over models of its own area.
        examples: Number of attacked examples by client.
        fedvck: ``largest_auc`` and ``mean_auc`` over clients of max(0.5, AUC), and ``defence_rate``, the share of
            clients with an AUC of at most 0.5 (FedVCK, Table 6); means over models, each with what chance gives.
    """

    auc: Estimate
    tpr: dict[str, Estimate]
    auc_of_models: tuple[float, float]
    clients: dict[int, tuple[float, float]]
    examples: dict[int, int]
    fedvck: dict[str, tuple[float, float]]


def membership_report(attacked: Mapping[int, Attacked], seed: int = 0) -> MembershipReport:
    """Evaluates an attack on the models of all clients.

    Intervals are those of a bootstrap that draws pairs of models, and examples, with replacement, because scores of one
    model, and of one example, are dependent (Owen, Annals of Applied Statistics 2007).

    Args:
        attacked: The attacked examples by client. Of the J models, 0 and 1, 2 and 3 and so on make a pair.
        seed: Seed of bootstrap and permutations.

    Raises:
        ValueError: If no member or no non-member has a score.
    """
    table = _Table.of(attacked)
    if table.member.all() or not table.member.any():
        raise ValueError("members and non-members with a score are needed, one of each at least")
    curve, rng = _Curve(table.score), numpy_generator(seed, "membership report")
    plain = np.ones(len(table.score))
    reached = curve.metrics(table.member, plain)
    drawn = [curve.metrics(table.member, table.resampled(rng)) for _ in range(DRAWS)]
    permuted = [table.permuted(rng) for _ in range(DRAWS)]
    chance = [curve.metrics(member, plain) for member in permuted]

    def estimate(name: str) -> Estimate:
        low, high = np.nanquantile([entry[name] for entry in drawn], [0.025, 0.975])
        by_chance = [entry[name] for entry in chance]
        return Estimate(
            reached[name],
            float(low),
            float(high),
            float(np.mean(by_chance)),
            float(np.quantile(by_chance, 0.975)),
        )

    areas = table.areas(table.member)
    models = [
        area_under_curve(table.score[rows], table.member[rows])
        for rows in (table.model == number for number in np.unique(table.model))
        if _has_both(table.member[rows])
    ]
    measures = _fedvck_measures(areas)
    chance_measures = [_fedvck_measures(table.areas(member)) for member in permuted[: DRAWS // 4]]
    return MembershipReport(
        estimate("auc"),
        {name: estimate(name) for name in RATES},
        (float(np.mean(models)), float(np.std(models, ddof=1)) if len(models) > 1 else 0.0),
        {
            client: (float(np.nanmean(row)), float(np.nanstd(row, ddof=1)))
            for client, row in zip(attacked, areas, strict=True)
            if not np.isnan(row).all()
        },
        {client: entry.scores.shape[1] for client, entry in attacked.items()},
        {
            name: (value, float(np.mean([entry[name] for entry in chance_measures])))
            for name, value in measures.items()
        },
    )


def pooled_roc(attacked: Mapping[int, Attacked]) -> tuple[Floats, Floats]:
    """Computes false and true positive rates of all clients and models together, both ascending."""
    table = _Table.of(attacked)
    return _Curve(table.score).rates(table.member, np.ones(len(table.score)))


def area_under_curve(score: Floats, member: NDArray[np.bool_]) -> float:
    """Computes the area under the ROC curve of scores [n], high for members."""
    return _Curve(score).metrics(member, np.ones(len(score)))["auc"]


@dataclass(frozen=True)
class _Table:
    """All scores in rows, with number of their client, model and example, and of the example's cell under the model."""

    score: Floats
    member: NDArray[np.bool_]
    client: NDArray[np.int64]
    model: NDArray[np.int64]
    example: NDArray[np.int64]
    group: NDArray[np.int64]
    clients: int

    @classmethod
    def of(cls, attacked: Mapping[int, Attacked]) -> "_Table":
        """Joins clients; scores that are NaN are left out."""
        columns: list[list[NDArray]] = [[] for _ in range(6)]
        examples = cells = 0
        for number, of_client in enumerate(attacked.values()):
            models, n = of_client.scores.shape
            model = np.repeat(np.arange(models), n)
            example, cell = np.tile(np.arange(n), models), np.tile(of_client.cells.numpy(), models)
            scores = of_client.scores.double().numpy().ravel()
            present = ~np.isnan(scores)
            rows = (
                scores,
                of_client.members.numpy().ravel(),
                np.full(len(scores), number),
                model,
                examples + example,
                (cells + cell) * models + model,
            )
            for column, row in zip(columns, rows, strict=True):
                column.append(row[present])
            examples, cells = examples + n, cells + int(of_client.cells.max()) + 1
        score, member, client, model, example, group = map(np.concatenate, columns)
        return cls(score, member, client, model, example, group, len(attacked))

    def resampled(self, rng: np.random.Generator) -> Floats:
        """Draws how often each row counts: as often as its pair of models times as often as its example."""
        pairs, examples = self.model // 2, self.example

        def times(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
            values = np.unique(numbers)
            drawn = np.bincount(rng.choice(values, len(values)), minlength=values.max() + 1)
            return drawn[numbers]

        return (times(pairs) * times(examples)).astype(float)

    def permuted(self, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Permutes membership within each cell of each model."""
        shuffled = np.empty_like(self.member)
        order = np.argsort(self.group, kind="stable")
        shuffled[order] = self.member[np.lexsort((rng.random(len(order)), self.group))]
        return shuffled

    def areas(self, member: NDArray[np.bool_]) -> Floats:
        """Computes the area under the curve of each client and model [clients, J]; NaN without members or others."""
        areas = np.full((self.clients, self.model.max() + 1), np.nan)
        for client, model, rows, ranks in self._ranked:
            inside = member[rows]
            if _has_both(inside):
                m = inside.sum()
                area = (ranks[inside].sum() - m * (m + 1) / 2) / (m * (len(ranks) - m))
                areas[client, model] = area
        return areas

    @cached_property
    def _ranked(self) -> list[tuple[int, int, NDArray[np.int64], Floats]]:
        """Client, model, rows and ranks of scores, for each client and model."""
        models = int(self.model.max()) + 1
        keys, groups = self.client * models + self.model, []
        for key in np.unique(keys):
            rows = np.flatnonzero(keys == key)
            groups.append((int(key) // models, int(key) % models, rows, rankdata(self.score[rows])))
        return groups


class _Curve:
    """The ROC curve of fixed scores under any truth and weights."""

    def __init__(self, score: Floats) -> None:
        self.order = np.argsort(-score, kind="stable")
        ordered = score[self.order]
        # Equal scores make a single step of the curve.
        self.ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)

    def rates(self, member: NDArray[np.bool_], weight: Floats) -> tuple[Floats, Floats]:
        inside, outside = (np.where(side, weight, 0.0)[self.order].cumsum() for side in (member, ~member))
        with np.errstate(invalid="ignore"):
            true, false = (np.append(0.0, sums[self.ends] / sums[-1]) for sums in (inside, outside))
        return false, true

    def metrics(self, member: NDArray[np.bool_], weight: Floats) -> dict[str, float]:
        false, true = self.rates(member, weight)
        area = {"auc": float(np.trapezoid(true, false))}
        return area | {name: float(true[false <= rate].max(initial=0.0)) for name, rate in RATES.items()}


def _fedvck_measures(areas: Floats) -> dict[str, float]:
    """Computes the measures of membership inference that FedVCK's paper has, of areas by client and model."""
    present = ~np.isnan(areas)
    floor = np.where(present, np.maximum(areas, 0.5), 0.0)
    return {
        "largest_auc": float(floor.max(0)[present.any(0)].mean()),
        "mean_auc": float(floor[present].mean()),
        "defence_rate": float((areas[present] <= 0.5).mean()),
    }


def _has_both(member: NDArray[np.bool_]) -> bool:
    """Tells whether there are members and non-members."""
    return bool(member.any() and not member.all())
