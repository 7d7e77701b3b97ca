"""Clipped and noised sums: what one image changes, the variance of the noise, budgets, replay."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import refusal
from torch.utils.data import DataLoader

from lit_fedad.contracts import SUM, Context, Exchange, Exchanges, Method, NothingNew, Server, Sums, Update
from lit_fedad.contracts.disclosure import Disclosure, Kind
from lit_fedad.core.errors import UserError
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.privacy.dp_sgd import TrainingPrivacy
from lit_fedad.privacy.image_privacy import Course, ImagePrivacy, Plan, epsilon_of, in_words, noise_key
from lit_fedad.privacy.noised_sums import Noise, Noised, clipped_sum, gaussian
from lit_fedad.privacy.protection import is_protected, protect
from lit_fedad.privacy.secure_aggregation import SecureSum

SHAPES = {"a": (2, 3), "b": ()}


class Rows:
    """Sums of rows [7] of a loader: six entries of ``a``, one of ``b``."""

    def shapes(self):
        return SHAPES

    def per_image(self, loader):
        for rows in loader:
            yield {"a": rows[:, :6].unflatten(1, (2, 3)), "b": rows[:, 6]}


def clipped(rows, clip=1.0, batch_size=2):
    total = clipped_sum(Rows(), DataLoader(rows, batch_size=batch_size), clip)
    return torch.cat([total["a"].flatten(), total["b"].flatten()])


@pytest.mark.parametrize("clip", [0.1, 1.0, 30.0])
def test_one_image_changes_a_sum_by_at_most_the_clip(clip):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 7, generator=draw, dtype=torch.float64) * torch.logspace(-3, 8, 12)[:, None]
    rows[5] = -1e150 * rows[4].sign()  # an adversary's: against another, and huge
    whole = clipped(rows, clip)
    for image in range(12):
        change = whole - clipped(torch.cat([rows[:image], rows[image + 1 :]]), clip)
        assert float(change.norm()) <= clip * (1 + 1e-9)
        expected = rows[image] * min(1.0, clip / float(rows[image].norm()))
        torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-9)


def test_batches_do_not_matter_and_what_is_not_finite_adds_nothing():
    rows = torch.arange(35, dtype=torch.float64).view(5, 7)
    torch.testing.assert_close(clipped(rows, 2.0, batch_size=1), clipped(rows, 2.0, batch_size=5))
    others = clipped(rows[[0, 1, 3, 4]])
    for value in (torch.nan, torch.inf):
        rows[2, 3] = value
        torch.testing.assert_close(clipped(rows), others)


def test_noise_has_the_stated_variance_and_depends_on_secret_and_place():
    shapes, context = {"a": (200, 200), "b": ()}, Context(seed=0, round=1)
    drawn = gaussian(b"k" * 32, context, shapes, 2.5)["a"]
    # 40,000 draws: the mean has deviation .0125, the variance .044.
    assert abs(float(drawn.mean())) < 0.1
    assert float(drawn.var()) == pytest.approx(6.25, abs=0.35)
    assert drawn.equal(gaussian(b"k" * 32, context, shapes, 2.5)["a"])
    others = [
        gaussian(b"l" * 32, context, shapes, 2.5),
        *(gaussian(b"k" * 32, Context(0, *place), shapes, 2.5) for place in ((2,), (1, 0), (1, None, 1))),
    ]
    for other in others:
        assert abs(float((other["a"] * drawn).mean())) < 0.25  # eight deviations
    with pytest.raises(ValueError, match="no secret"):
        gaussian(b"", context, shapes, 2.5)


class Sends(Exchange):
    def __init__(self, sums):
        self.sums = Sums(by_image=lambda client: sums)

    def upload_spec(self, client):
        return {"a": None}

    def aggregate(self, server, updates):
        """Merges sums."""


class OneSum:
    """A method with one noised sum before round 1 and one in every round, beside one that brings nothing."""

    client = server = None
    exchanges = Exchanges((Sends(Rows()),), (Sends(Rows()), Sends(NothingNew({}))))


def plan(method=None, rounds=3, sampler=None, secure_sum=None, staged=False, **settings):
    privacy = ImagePrivacy(**{"epsilon": 4.0, **settings})
    return privacy.plan(
        method or Method(None, None, OneSum.exchanges),
        Course(rounds, dict.fromkeys(range(5), 9), sampler or ClientSampler(), secure_sum, staged),
    )


def test_two_noised_sums_in_a_round_are_refused():
    # A resumed round may ask other clients first; the second sum is then another, and its noise would be the same.
    with refusal("sends 2 sums in a round, and only one can be noised"):
        plan(Method(None, None, Exchanges((), (Sends(Rows()), Sends(Rows())))))


def test_the_noise_is_the_least_that_the_budget_asks_for():
    found = plan()
    assert found.releases == 4
    assert found.epsilon(4) == pytest.approx(4.0, rel=1e-6)
    assert found.epsilon(4) == epsilon_of(math.sqrt(4) / found.sigma, 1e-5)
    assert found.noise.deviation == pytest.approx(0.5 * found.sigma)
    assert found.noise.share == 0  # the server adds it
    assert plan(unit_images=3).noise.deviation == pytest.approx(1.5 * found.sigma)


def test_a_budget_that_would_be_overdrawn_is_refused_before_the_run_and_before_a_round():
    with pytest.raises(UserError, match="this run needs epsilon .* for 4 noised sums, and the budget is 1;"):
        plan(epsilon=1.0, noise=2.0)
    found = plan()
    found.check(4, "round 3")
    with refusal("round 4 needs epsilon .* for 5 noised sums, and the budget is 4"):
        found.check(5, "round 4")


@pytest.mark.parametrize(("where", "hidden"), [("distributed", True), ("central", False)])
def test_noise_that_the_server_draws_hides_nothing_from_it(where, hidden):
    found = plan(where=where, secure_sum=SecureSum(quorum=0.5) if hidden else None)
    inner = Sends(Rows())
    inner.discloses = (Disclosure(Kind.PATCHES, "rows"),)
    (told,) = Noised(inner, None, found.noise, b"k" * 32).discloses
    assert (told.noised, told.kind) == ((True, Kind.SUMS) if hidden else (False, Kind.PATCHES))


def test_a_sum_longer_than_its_images_allow_is_refused_unless_noise_is_in_it():
    inner = Sends(Rows())
    inner.discloses = (Disclosure(Kind.SUMS, "rows"),)
    for norm, carriers, refused in ((4.5, None, False), (4.545, None, True), (4.545, 3, False)):
        exchange = Noised(inner, None, Noise(0.5, 1.0, carriers), b"k" * 32)
        entry = norm / math.sqrt(7)
        update = Update({"a": torch.full((2, 3), entry), "b": torch.tensor(-entry)}, 9)
        with refusal("norm of 4.545, its images at most 4.5") if refused else nullcontext():
            exchange.validate(None, 0, update)


def test_a_budget_of_endless_rounds_costs_no_memory():
    assert plan(rounds=10**15).epsilon(10**15) == pytest.approx(4.0, rel=1e-6)


def test_the_difference_of_sums_of_different_clients_is_no_clients_own():
    """A run that is resumed plays an exchange again, and a client may be missing then."""
    found = plan()
    server, own = Server(), {"a": torch.ones(2, 3), "b": torch.ones(())}
    updates = dict.fromkeys(range(5), Update(own, 9))
    inner = Sends(Rows())
    inner.discloses = (Disclosure(Kind.SUMS, "rows"),)
    exchange = Noised(inner, None, found.noise, b"k" * 32)
    assert exchange.noised  # no client is tried alone
    whole, again = (exchange.released(server, updates)["a"] for _ in range(2))
    assert whole.equal(again)
    rest = exchange.released(server, {client: updates[client] for client in range(4)})["a"]
    assert not torch.isclose(whole - rest, own["a"].double()).any()
    drawn = gaussian(b"k" * 32, server.context, SHAPES, found.noise.deviation)["a"]
    torch.testing.assert_close(whole, drawn + 5)


def test_distributed_shares_add_up_to_the_central_noise():
    found = plan(where="distributed", secure_sum=SecureSum(quorum=0.5))
    assert found.carriers == 3  # the fewest of five that may finish
    assert 3 * found.noise.share**2 == pytest.approx(found.noise.deviation**2)
    shapes = {"a": (150, 150)}
    shares = [
        gaussian(b"k" * 32, Context(0, 1, client), shapes, found.noise.share)["a"] for client in range(3)
    ]
    assert float(sum(shares).var()) == pytest.approx(found.noise.deviation**2, rel=0.08)  # eight deviations


@pytest.mark.parametrize(
    ("carriers", "clients", "noise"),
    [(3, 2, []), (3, 3, [2.0]), (3, 5, [2 * math.sqrt(5 / 3)]), (None, 2, [2.0])],
)
def test_a_sum_of_too_few_shares_of_noise_is_not_merged_and_one_of_more_is_merged_as_noisier(
    carriers, clients, noise
):
    deviations, sums = [], []

    class Merged(Rows):
        def from_sums(self, server, total, deviation):
            deviations.append(deviation)
            sums.append(total["b"])
            return total

    inner = Sends(Merged())
    inner.discloses = (Disclosure(Kind.SUMS, "rows"),)
    exchange = Noised(inner, None, Noise(0.5, 2.0, carriers), b"k" * 32)
    total = Update({"a": torch.ones(2, 3), "b": torch.tensor(7.0)}, 9, tuple(range(clients)))
    with refusal("the sum of 2 clients holds less noise than that of 3, .*") if not noise else nullcontext():
        exchange.aggregate(Server(), {SUM: total})
    assert deviations == pytest.approx(noise)
    # Clients' shares are in the sum already.
    assert [float(one) == 7 for one in sums] == [carriers is not None] * len(noise)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"where": "distributed"}, "give federation=secure"),
        (
            {"where": "distributed", "secure_sum": SecureSum(), "sampler": ClientSampler(fraction=0.5)},
            "fraction=1",
        ),
        ({"staged": True}, "data that come in stages"),
        (
            {"rounds": 0, "method": Method(None, None, Exchanges())},
            "nothing is sent",
        ),
        (
            {"method": Method(None, None, Exchanges((Sends(None),)))},
            "no sum over images",
        ),
        ({"delta": 0.5}, "federation.privacy.delta"),
        ({"clip": 0.0}, "federation.privacy.clip"),
        ({"epsilon": None, "noise": 1.0}, "needs a budget"),
        ({"unit_images": 0}, "federation.privacy.unit_images"),
    ],
)
def test_what_cannot_be_protected_is_refused_in_one_line(given, message):
    with refusal(message):
        plan(**given)


def test_the_secret_lasts_as_long_as_the_run_and_other_images_get_other_noise(tmp_path):
    first = noise_key(tmp_path / "run", None, "images")
    assert noise_key(tmp_path / "run", None, "images") == first
    assert noise_key(tmp_path / "run", None, "others") != first
    assert noise_key(tmp_path / "other", None, "images") != first
    assert noise_key(tmp_path / "a", 3, "images") == noise_key(tmp_path / "b", 3, "images")
    assert (tmp_path / "run" / "noise.key").stat().st_mode & 0o077 == 0
    (tmp_path / "run" / "noise.key").write_bytes(b"short")
    with pytest.raises(UserError, match=r"noise\.key: is no key"):
        noise_key(tmp_path / "run", None, "images")


def test_what_was_spent_is_said_in_words():
    words = in_words(Plan(ImagePrivacy(epsilon=4.0, unit_images=7), 2.0, 2).summary(2))
    assert f"epsilon {epsilon_of(math.sqrt(2) / 2, 1e-5):.4g} at delta 1e-05" in words
    assert "group of up to 7 images" in words
    assert "known seed" not in words
    assert "known seed" in in_words(Plan(ImagePrivacy(epsilon=4.0, seed=1), 2.0, 2).summary(1))


@pytest.mark.parametrize("privacy", [ImagePrivacy(), TrainingPrivacy()])
def test_a_run_without_budget_is_told_that_nothing_is_promised(privacy):
    federation = SimpleNamespace(method=None, sampler=None, clients=[])
    with pytest.warns(UserWarning, match=r"nothing is noised .* give federation\.privacy\.epsilon"):
        assert protect(federation, privacy=privacy) is federation


@pytest.mark.parametrize(
    ("secure_sum", "privacy", "protected"),
    [(None, None, False), ({"quorum": 0.5}, None, True), (None, {"epsilon": 4.0}, True)],
)
def test_either_secure_sums_or_noise_protect_a_run(secure_sum, privacy, protected):
    assert is_protected({"federation": {"secure_sum": secure_sum, "privacy": privacy}}) is protected
