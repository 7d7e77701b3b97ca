"""What a review says to the person who decides whether a federation may take part of a site's images."""

from dataclasses import replace
from functools import cache

import pytest
from helpers.class_sites import CLASSES, class_data
from helpers.sites import DEBUG, HERE, with_keys

from lit_fedad.contracts.disclosure import Disclosure, Kind, summed
from lit_fedad.sites.offer import Offer, Taken
from lit_fedad.sites.review import MEANINGS, TERMS, described, review, verdict
from lit_fedad.sites.settings import Policy, SiteSettings

SMALL = ("features=train", "encoder=convnet", "encoder.channels=8", "task.decoder.channels=8")
SUMS = ("method=federated_subspace", "rounds=1")
TRAINED = ("method=fedavg", "task=autoencoder", *SMALL)
SECURE = (*SUMS, "rounds=0", "federation=secure")
NOISED = (*SECURE, "federation/privacy=distributed", "federation.privacy.epsilon=8")
CLASSIFIED = ("method=fedavg", "task=classifier", "features=frozen", "federation/robust=off")
OWN_NOISE = (*CLASSIFIED, "federation/privacy=dp_sgd", "federation.privacy.epsilon=8")


@pytest.fixture(scope="module")
def told(folder):
    """Reviews an offer at a site with image files, or labelled images; under the policy of `site init` or another."""
    own = (*HERE, f"cache.folder={folder / 'cache'}")
    files = with_keys(folder, "north")
    classes = SiteSettings("east", folder / "classes" / "east", class_data(folder / "classes" / "east"), own)

    @cache
    def lines(*words, **policy):
        learns = "task=classifier" in words
        given = replace(classes if learns else files, policy=Policy(**policy))
        return review(given, Offer([*DEBUG, *words], CLASSES if learns else ())).lines

    return lines


LOSS, MASKED = "With each training: its loss and other means over all images. ", "Messages are masked: "
CRAFTED = "Training images: a coordinator that does not keep to the method can send a model"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (SUMS, "1 round, asked by the coordinator"),
        (SUMS, "would train with 8 images. It would send"),
        (SUMS, "and after each round: numbers of test images"),
        (TRAINED, "2 rounds, asked by the coordinator"),
        (TRAINED, "would train with 6 images and set thresholds by 2 others. It would send"),
        (
            (*TRAINED, "evaluation.every=2"),
            "After every 2 rounds, and after the last: numbers of test images",
        ),
        (TRAINED, f"{LOSS}Allowed."),
        (TRAINED, CRAFTED),
        (CLASSIFIED, f"{LOSS}Allowed."),
        (SECURE, MASKED),
        (NOISED, "Noise: epsilon"),
        pytest.param(OWN_NOISE, "Noise: epsilon", marks=pytest.mark.slow),
    ],
)
def test_a_review_says(told, words, line):
    assert line in " ".join(told(*words))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (SUMS, "set thresholds by"), (SUMS, LOSS), (SUMS, MASKED), (SUMS, "Noise:"), (SUMS, CRAFTED),
        (CLASSIFIED, "calibration"), pytest.param(OWN_NOISE, LOSS, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_review_does_not_say(told, words, line):
    assert line not in " ".join(told(*words))


def test_losses_need_an_approval_where_sums_do(told):
    assert f"- {LOSS}Left out, unless you approve." in told(*TRAINED, allow=("counts", "weights"))


def test_what_no_approval_lets_out_is_called_refused(told):
    """What needs an approval because of few images is not called so."""
    assert sum("REFUSED by policy.allow" in line for line in told(*SUMS, allow=("sums",))) == 4


@pytest.mark.parametrize(
    ("words", "kinds"),
    [(SUMS, {Kind.COUNTS, Kind.SUMS}), (CLASSIFIED, {Kind.COUNTS, Kind.SUMS, Kind.WEIGHTS})],
)
def test_kinds_that_a_review_names_are_explained(told, words, kinds):
    explained = {kind for kind in Kind if f"- {kind.words}: {MEANINGS[kind]}." in told(*words)}
    assert explained == kinds


@pytest.mark.parametrize(
    ("words", "terms"),
    [(SUMS, {"feature", "patch", "covariance", "score", "bin", "label"}), (CLASSIFIED, {"score", "bin"})],
)
def test_other_words_are_explained_where_a_review_uses_them(told, words, terms):
    assert {term for term in TERMS if f"- {term}: {TERMS[term]}." in told(*words)} == terms


def test_answers_about_few_test_images_need_an_approval(told):
    ends = {few: [line for line in told(*SUMS, images=few) if "test images" in line] for few in (1, 1000)}
    assert [line.endswith("Allowed.") for line in ends[1] if line.startswith("-")] == [True] * 2
    asked = [line for line in ends[1000] if line.startswith("-")]
    assert [line.endswith("images are few.") and "NEEDS YOUR APPROVAL: " in line for line in asked] == [
        True
    ] * 2


SUM, IMAGES = summed("x"), Disclosure(Kind.IMAGES, "x", None)


@pytest.mark.parametrize(
    ("disclosed", "allow", "images", "words"),
    [
        (SUM, ("sums",), 5, "Allowed"),
        (SUM, ("sums",), 4, "NEEDS YOUR APPROVAL: of fewer than 5 images"),
        (SUM, ("counts",), 5, "NEEDS YOUR APPROVAL"),
        (IMAGES, ("sums",), 5, "REFUSED, unless policy.allow in site.yaml names images"),
        (IMAGES, ("images",), 5, "Allowed"),
    ],
)
def test_a_review_says_what_the_policy_does(disclosed, allow, images, words):
    part = Taken(1, 0, "train", disclosed, 9)
    assert verdict(Policy(allow=allow, images=5), part, images) == words


@pytest.mark.parametrize(("each", "ending"), [("", "9 B."), ("images", "9 B for each of its images.")])
def test_a_message_without_a_bound_is_said_by_the_size_of_one_thing(each, ending):
    assert described(Taken(1, 0, "train", SUM, 9, each), 2, 5).endswith(f"has at most {ending}")


@pytest.mark.parametrize(
    ("round", "rounds", "when"),
    [
        (0, 5, "Once, at the beginning"), (-1, 1, "Once, at the beginning"), (1, 1, "In the round"),
        (1, 2, "In each of 2 rounds"),
    ],
)  # fmt: skip
def test_a_review_says_when_something_is_sent(round, rounds, when):
    assert described(Taken(round, 0, "train", summed("x"), 9), rounds, 5).startswith(f"{when} (train): ")


@pytest.mark.parametrize(
    ("own", "images", "said"),
    [
        (None, 5, "each value of at least 5 images;"), (3, 5, "each value of at least 3 images;"),
        (9, 5, "each value of at least 5 images;"), (1, 5, "a value may be of one image alone;"),
        (None, 1, "a value may be of one image alone;"), (None, 2, "each value of at least 2 images;"),
    ],
)  # fmt: skip
def test_the_fewest_images_behind_a_value_are_said(own, images, said):
    assert said in described(Taken(1, 0, "train", summed("x", own), 9), 2, images)


def test_a_number_of_single_things_is_of_no_number_of_images():
    said = described(Taken(1, 0, "train", Disclosure(Kind.PATCHES, "x", None), 9), 2, 5)
    assert "each value" not in said
    assert "one image" not in said


@pytest.mark.parametrize("hidden", [True, False])
def test_noise_that_hides_single_images_is_said(hidden):
    disclosed = replace(summed("x"), noised=hidden)
    assert ("; noise hides single images" in described(Taken(1, 0, "train", disclosed, 9), 2, 5)) is hidden
