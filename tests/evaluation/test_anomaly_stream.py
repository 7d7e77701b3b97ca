"""How detectors whose product types come task after task are judged: against scikit-learn and NumPy, task by task."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from lightning.fabric import Fabric
from sklearn.metrics import average_precision_score, roc_auc_score

from lit_fedad.contracts import Context, Prediction, Predictors
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.stream import StreamDataModule
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator, product_evaluators
from lit_fedad.evaluation.predict import Cases
from lit_fedad.federation.round_report import RoundReport

PRODUCTS = "abcd"
ROUNDS = 6
TEST = [(product, defect) for _ in range(5) for product in PRODUCTS for defect in ("good", "bad", "bad")]
IMAGES = ImageSet(
    "toy",
    tuple(Sample(Path(f"{product}{i}.png"), product) for product in PRODUCTS for i in range(4)),
    tuple(
        Sample(Path(f"t{i}.png"), p, d, Path("m") if d == "bad" else None) for i, (p, d) in enumerate(TEST)
    ),
)
LABELS = np.array([sample.label for sample in IMAGES.test])
OF = np.array([sample.category for sample in IMAGES.test])
# Tasks by client; nobody holds the fourth product. The second client has fewer tasks, in another order.
A, B, C, D = ([4 * product, 4 * product + 1] for product in range(4))
STAGES = [[A, B, C], [[9], [5, 6]]]
MET = [["a", "ab", "abc"], ["c", "cb"]]


class Pictures:
    """Test images that are nothing but their masks; remembers which were read.

    With ``regions``, masks are one square of four pixels, found where so many pixels are.
    """

    def __init__(self, images, regions=0):
        self.labels = torch.tensor([sample.label for sample in images.test])
        self.masks = torch.rand(len(self.labels), 4, 4, generator=torch.Generator().manual_seed(0)) < 0.3
        if regions:
            self.masks = torch.zeros_like(self.masks)
            self.masks[:, 1:3, 1:3] = True
        self.masks &= self.labels.bool()[:, None, None]
        self.regions, self.read = regions, []

    def __len__(self):
        return len(TEST)

    def __getitems__(self, indices):
        self.read += indices
        index = torch.tensor(indices)
        batch = {"index": index, "label": self.labels[index], "mask": self.masks[index].byte()}
        if self.regions:
            batch["regions"] = [self.regions * mask[None][: mask.any()].int() for mask in self.masks[index]]
        return batch


class Detector:
    """Scores at random, but for every client and round in the same way; anomalies a little higher."""

    def __init__(self, alike=False, maps=False):
        self.predictors, self.maps = Predictors(shared=alike, server_shared=alike), maps
        rng = np.random.default_rng(0)
        self.scores = rng.random((2, ROUNDS + 1, len(TEST))) + 0.3 * LABELS
        self.pixels = rng.random((2, ROUNDS + 1, len(TEST), 4, 4))

    def predict_step(self, batch):
        at = 0 if self.predictors.shared else self.number, self.round, batch["index"].numpy()
        maps = torch.from_numpy(self.pixels[at]) if self.maps else None
        return Prediction(torch.from_numpy(self.scores[at]), maps)


class Rounds:
    """The rounds of a federation as an evaluator sees them."""

    clients = (0, 1)
    fabric = Fabric(accelerator="cpu", devices=1)

    def __init__(
        self, client, stages=STAGES, images=IMAGES, schedule="stage_major", regions=0, spro_limit=None,
        common=True,
    ):  # fmt: skip
        self.client, self.history, self.asked = client, [], []
        self.pictures = Pictures(images, regions)
        self.module = StreamDataModule(
            range(len(images.train)), self.pictures, stages, ROUNDS, schedule, eval_batch_size=8
        )
        counts = Partition.in_stages(stages).stage_counts(images)
        self.evaluator = AnomalyStreamEvaluator(
            product_evaluators(images, self.module, counts, self.fabric, spro_limit=spro_limit),
            self.module.timetable,
            counts,
            common=common,
        )

    def ask(self, round, question, clients):
        answers = {}
        for number in clients:
            self.client.number, self.client.round = number, round
            self.client.context = Context(0, round + 1, number)
            self.asked.append((number, round))
            answers[number] = question(self.client, number)
        return answers

    def play(self, evaluated=range(ROUNDS + 1)):
        for round in range(ROUNDS + 1):
            self.history.append(RoundReport(round, "train", [0, 1]))
            if round in evaluated:
                found = self.evaluator.evaluate(self, round)
                self.history[-1].metrics = found and found.metrics
        return [report.metrics for report in self.history]


def stage_of(client, round):
    """Six rounds: two of each of three tasks, or three of each of two. Set-up belongs to the first."""
    return max(round - 1, 0) // (2 if client == 0 else 3)


def i_auroc(detector, client, round, products):
    chosen = np.isin(OF, list(products))
    return roc_auc_score(LABELS[chosen], detector.scores[client, round][chosen])


def table_by_hand(detector, client, round):
    """I-AUROC after each task up to now (rows) on each of them (columns), and on all that were met then."""
    stage, length = stage_of(client, round), 2 if client == 0 else 3
    ends = [*((task + 1) * length for task in range(stage)), round]
    tasks = [MET[client][task][-1] for task in range(stage + 1)]
    on_each = np.array([[i_auroc(detector, client, end, task) for task in tasks] for end in ends])
    return on_each, [i_auroc(detector, client, end, MET[client][task]) for task, end in enumerate(ends)]


@pytest.fixture(scope="module")
def played():
    rounds = Rounds(Detector(maps=True))
    return rounds, rounds.play()


def test_every_round_against_scikit_learn(played):
    rounds, found = played
    detector = rounds.client
    for round, client in [(r, c) for r in range(ROUNDS + 1) for c in (0, 1)]:
        stage = stage_of(client, round)
        chosen = np.isin(OF, list(MET[client][stage]))
        on_each, on_met = table_by_hand(detector, client, round)
        drops = [on_each[task:stage, task].max() - on_each[stage, task] for task in range(stage)]
        expected = {
            "i_auroc": on_met[-1],
            "aupr": average_precision_score(LABELS[chosen], detector.scores[client, round][chosen]),
            "incremental_i_auroc": np.mean(on_met),
            "forgetting": np.mean(drops) if drops else math.nan,
            **{f"i_auroc_task_{t + 1}": on_each[-1, t] if t <= stage else math.nan for t in range(3)},
        }
        for name, value in expected.items():
            own = found[round][name]["per_client"][client]
            assert own == pytest.approx(value, abs=1e-9, nan_ok=True), (name, round, client)
        masks, pixels = rounds.pictures.masks[chosen].numpy(), detector.pixels[client, round][chosen]
        own = found[round]["p_auroc"]["per_client"][client]
        assert own == pytest.approx(roc_auc_score(masks.ravel(), pixels.ravel()), abs=1e-3)


def test_each_product_is_averaged_over_the_clients_that_have_met_it(played):
    rounds, found = played
    for round in range(ROUNDS + 1):
        met = {client: MET[client][stage_of(client, round)] for client in (0, 1)}
        expected = {
            product: np.mean([i_auroc(rounds.client, c, round, product) for c in met if product in met[c]])
            for product in set(met[0] + met[1])
        }
        assert found[round]["i_auroc"]["per_product"] == pytest.approx(expected)
        assert found[round]["i_auroc"]["product_mean"] == pytest.approx(np.mean(list(expected.values())))
    assert "per_product" not in found[ROUNDS]["forgetting"]


def test_clients_are_summarised(played):
    rounds, found = played
    last = found[-1]
    for name, worst in (("i_auroc", min), ("incremental_i_auroc", min), ("forgetting", max)):
        values = last[name]["per_client"].values()
        assert last[name]["mean"] == pytest.approx(np.mean(list(values)))
        assert last[name]["worst"] == worst(values)
    # All clients' scores of what each has met in one pool; what spans tasks by training images: six and three.
    met = [np.isin(OF, list(MET[client][-1])) for client in (0, 1)]
    labels = np.concatenate([LABELS[chosen] for chosen in met])
    scores = np.concatenate(
        [rounds.client.scores[client, ROUNDS][chosen] for client, chosen in enumerate(met)]
    )
    assert last["i_auroc"]["pooled"] == pytest.approx(roc_auc_score(labels, scores))
    own = last["forgetting"]["per_client"]
    assert last["forgetting"]["pooled"] == pytest.approx((6 * own[0] + 3 * own[1]) / 9)
    # In the third round the first client has had two tasks of two images, the second one task of one.
    own = found[3]["incremental_i_auroc"]
    assert own["pooled"] == pytest.approx((4 * own["per_client"][0] + own["per_client"][1]) / 5)
    # The second client has no third task.
    assert last["i_auroc_task_3"]["mean"] == last["i_auroc_task_3"]["per_client"][0]


def test_metrics_are_named_in_order_and_all_of_them_are_given(played):
    rounds, found = played
    assert rounds.evaluator.metrics == (
        *AnomalyEvaluator.metrics,
        *("incremental_i_auroc", "forgetting"),
        *("i_auroc_task_1", "i_auroc_task_2", "i_auroc_task_3"),
    )
    for metrics in found:
        assert set(metrics) == set(rounds.evaluator.metrics)


@pytest.mark.slow
def test_ends_of_tasks_are_all_it_takes(played):
    """The first client's tasks end with rounds 2, 4, 6, the second's with 3 and 6."""
    rounds, found = played
    assert rounds.module.milestones == {2, 3, 4, 6}
    ends = Rounds(Detector(maps=True)).play(rounds.module.milestones)
    np.testing.assert_equal(ends[-1], found[-1])


def test_tasks_that_were_not_measured_at_their_end_count_in_no_mean(played):
    """Of the first client's tasks only the second was evaluated before the last."""
    _, found = played
    sparse = Rounds(Detector()).play([4, 6])[-1]
    for name in ("i_auroc", "i_auroc_task_1"):
        np.testing.assert_equal(sparse[name], found[-1][name])
    on_each, on_met = table_by_hand(Detector(), 0, ROUNDS)
    drops = on_each[1, :2] - on_each[2, :2]
    assert sparse["forgetting"]["per_client"][0] == pytest.approx(drops.mean())
    assert sparse["incremental_i_auroc"]["per_client"][0] == pytest.approx(np.mean(on_met[1:]))


@pytest.mark.slow
def test_clients_that_predict_alike_are_scored_once_each_on_its_own_products():
    evaluated = (3, 4, 6)
    alike = Rounds(Detector(alike=True, maps=True))
    found = alike.play(evaluated)
    assert alike.asked == [(0, round) for round in evaluated]
    detector = Detector(maps=True)
    detector.scores[1], detector.pixels[1] = detector.scores[0], detector.pixels[0]
    np.testing.assert_equal(found, Rounds(detector).play(evaluated))
    assert found[4]["i_auroc"]["per_client"][0] != found[4]["i_auroc"]["per_client"][1]


@pytest.mark.parametrize(("alike", "products"), [(False, "ac" + "abc" + "cb"), (True, "ac" + "abc")])
def test_images_of_products_that_were_not_met_are_not_looked_at(alike, products):
    rounds = Rounds(Detector(alike))
    rounds.play([2, 5])
    expected = sorted(index for product in products for index in np.flatnonzero(product == OF))
    assert sorted(rounds.pictures.read) == expected


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("maps", [True, False])
def test_pixels_are_measured_where_there_are_masks_and_maps(masks, maps):
    test = IMAGES.test if masks else tuple(Sample(s.path, s.category, s.defect) for s in IMAGES.test)
    found = Rounds(Detector(maps=maps), images=ImageSet("toy", IMAGES.train, test)).play([ROUNDS])[-1]
    assert ("p_auroc" in found) == ("pro" in found) == (masks and maps)
    assert found["i_auroc"]["per_client"][0] == pytest.approx(i_auroc(Detector(), 0, ROUNDS, "abc"))


@pytest.mark.slow
def test_regions_that_saturate_are_judged_on_what_was_met():
    """Masks are one region each. A region of which all pixels must be found has PRO; one found by any pixel, more."""
    found = {}
    for area in (4, 1):
        rounds = Rounds(Detector(maps=True), regions=area, spro_limit=0.3)
        found[area] = rounds.play([ROUNDS])[-1]
        assert "spro" in rounds.evaluator.metrics
        assert found[area]["spro"]["per_client"].keys() == {0, 1}
    for client in (0, 1):
        whole, part = (found[area]["spro"]["per_client"][client] for area in (4, 1))
        assert whole == found[4]["pro"]["per_client"][client]
        assert part > whole


def test_a_task_may_hold_several_products_and_bring_one_back():
    stages = [[A + B, [*C, 2]], [D, D[:1]]]
    rounds = Rounds(Detector(), stages)
    last = rounds.play([3, 6])[-1]
    for client, (first, second) in enumerate((("ab", "ac"), ("d", "d"))):
        before, now = (i_auroc(rounds.client, client, round, first) for round in (3, 6))
        assert last["forgetting"]["per_client"][client] == pytest.approx(before - now)
        values = [last[f"i_auroc_task_{task}"]["per_client"][client] for task in (1, 2)]
        assert values == pytest.approx([now, i_auroc(rounds.client, client, 6, second)])
        met = i_auroc(rounds.client, client, 6, first + second)
        assert last["i_auroc"]["per_client"][client] == pytest.approx(met)


def test_a_product_without_anomalies_has_no_value_and_spoils_no_other():
    normal = tuple(Sample(s.path, s.category, "good" if s.category == "a" else s.defect) for s in IMAGES.test)
    rounds = Rounds(Detector(), images=ImageSet("toy", IMAGES.train, normal))
    found = rounds.play()
    on_second = [i_auroc(rounds.client, 0, end, "b") for end in (4, 6)]
    assert math.isnan(found[-1]["i_auroc_task_1"]["per_client"][0])
    assert found[-1]["i_auroc_task_2"]["per_client"][0] == pytest.approx(on_second[1])
    assert found[-1]["forgetting"]["per_client"][0] == pytest.approx(on_second[0] - on_second[1])
    so_far = [found[end]["i_auroc"]["per_client"][0] for end in (4, 6)]
    assert math.isnan(found[2]["i_auroc"]["per_client"][0])
    assert found[-1]["incremental_i_auroc"]["per_client"][0] == pytest.approx(np.mean(so_far))


def test_tasks_that_come_again_in_every_global_round():
    """Literal schedule: a client's tasks so far are those of the global round that is played."""
    rounds = Rounds(Detector(), schedule="literal")
    last = rounds.play()[-1]
    on = {end: [i_auroc(rounds.client, 0, end, product) for product in "abc"] for end in (4, 5, 6)}
    drops = [max(on[4][0], on[5][0]) - on[6][0], on[5][1] - on[6][1]]
    assert last["forgetting"]["per_client"][0] == pytest.approx(np.mean(drops))
    fifth = rounds.history[5].metrics
    assert fifth["i_auroc"]["per_client"][0] == pytest.approx(i_auroc(rounds.client, 0, 5, "ab"))


def test_clients_with_test_images_of_their_own_are_judged_by_the_states_of_their_tasks(played):
    _, found = played
    for apart, together in zip(Rounds(Detector(), common=False).play(), found, strict=True):
        for name, value in apart.items():
            np.testing.assert_equal(value, {key: together[name][key] for key in value})
    with_maps = Rounds(Detector(maps=True), common=False).play([1])[1]
    assert with_maps["p_auroc"]["per_client"] == found[1]["p_auroc"]["per_client"]


def test_pixels_are_left_out_where_one_of_several_sites_has_no_maps(played):
    class HalfBlind(Detector):
        def predict_step(self, batch):
            self.maps = self.number == 0
            return super().predict_step(batch)

    apart = Rounds(HalfBlind(), common=False).play([1])[1]
    assert "p_auroc" not in apart
    assert apart["i_auroc"]["per_client"] == played[1][1]["i_auroc"]["per_client"]


def test_after_the_last_round_images_of_all_products_are_scored():
    rounds = Rounds(Detector())
    for round, all_products in ((ROUNDS - 1, False), (ROUNDS, True)):
        for client, predicted in rounds.evaluator.evaluate(rounds, round).predictions.items():
            met = np.isin(OF, list(MET[client][stage_of(client, round)]))
            assert predicted.scores.isfinite().tolist() == (met | all_products).tolist()


@pytest.mark.parametrize(("clients", "drawn"), [((0, 1), 0), ((1,), 1)])
def test_maps_are_kept_of_the_client_with_most_images_that_takes_part(clients, drawn):
    rounds = Rounds(Detector(maps=True))
    rounds.clients, rounds.evaluator.cases = clients, Cases(LABELS.tolist(), 1, {0: 6, 1: 3})
    kept = rounds.evaluator.evaluate(rounds, 1).predictions
    assert [client for client in clients if kept[client].maps] == [drawn]


@pytest.mark.parametrize(("product", "stages"), [("b", STAGES), ("d", [[D], [D]])])
def test_a_product_without_test_images_is_refused(product, stages):
    left = tuple(sample for sample in IMAGES.test if sample.category != product)
    with refusal(rf"toy: product '{product}' comes in a task but has no test images; .*"):
        Rounds(Detector(), stages, ImageSet("toy", IMAGES.train, left))


def test_scoring_draws_no_random_numbers():
    rounds = Rounds(Detector())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rounds.play()
    assert torch.equal(torch.get_rng_state(), before)


def test_other_processes_than_the_first_give_no_metrics():
    rounds = Rounds(Detector())
    rounds.fabric = SimpleNamespace(is_global_zero=False)
    assert rounds.play([ROUNDS])[-1] is None
    assert rounds.asked == [(0, ROUNDS), (1, ROUNDS)]
