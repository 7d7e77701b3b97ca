"""Merging memories: federated Lloyd against a central step of k-means, and slots that enough images share."""

import pytest
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.memory.merge import LloydAggregation, merge_radii, pooled_radii, shared_slots
from lit_fedad.memory.reduce import SlotReduce


def lloyd_step(patches, bank):
    """One central step, row by row in double precision."""
    at = torch.cdist(patches.double(), bank.double()).argmin(1)
    return torch.stack(
        [patches[at == k].double().mean(0) if (at == k).any() else bank[k].double() for k in range(len(bank))]
    )


@pytest.fixture
def maps():
    return torch.randn(12, 9, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def bank():
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", [[12], [4, 8], [1] * 12])
@pytest.mark.parametrize("backwards", [False, True])
def test_federated_lloyd_is_central_lloyd_whatever_the_partition(maps, bank, sizes, backwards):
    memory = bank
    for _ in range(3):
        uploads = []
        for own in maps.split(sizes)[:: -1 if backwards else 1]:
            reduce = SlotReduce(weights="none", average=False)
            reduce.start(memory, 1, len(bank), torch.Generator())
            reduce.update(own)
            uploads.append(reduce.finish())
        merged = LloydAggregation()(
            torch.cat([upload.memory for upload in uploads]),
            torch.cat([upload.counts for upload in uploads]),
            len(bank),
            memory,
            torch.Generator(),
        )
        expected = lloyd_step(maps.flatten(0, 1), memory)
        torch.testing.assert_close(merged.double(), expected, rtol=1e-6, atol=1e-6)
        memory = merged


def test_slots_are_means_of_their_patches_and_stay_without_one():
    """Of two clients: one patch in all, patches of both, none."""
    vectors, counts = torch.tensor([[5.0], [1.0], [7.0], [8.0], [4.0], [9.0]]), [1.0, 2.0, 0.0, 0.0, 1.0, 0.0]
    previous = torch.tensor([[0.0], [0.5], [3.0]])
    found = LloydAggregation()(vectors, torch.tensor(counts), 3, previous, torch.Generator())
    assert found.tolist() == [[5.0], [2.0], [3.0]]


def test_the_first_memory_is_clustered_by_weight():
    first = LloydAggregation(patches_per_slot=1)(
        torch.tensor([[0.0], [1.0], [10.0]]),
        torch.tensor([3.0, 1.0, 1.0]),
        2,
        None,
        torch.Generator().manual_seed(0),
    )
    assert sorted(first.flatten().tolist()) == [0.25, 10.0]


@pytest.mark.parametrize(("patches", "filled"), [(10, 2), (3, 1)])
def test_few_patches_fill_the_first_memory_with_copies(patches, filled):
    vectors = torch.randn(patches, 2, generator=torch.Generator().manual_seed(0))
    first = LloydAggregation(patches_per_slot=4)(
        vectors, torch.ones(patches), 5, None, torch.Generator().manual_seed(0)
    )
    assert first.shape == (5, 2)
    assert len(first.unique(dim=0)) == filled


def test_less_than_a_patch_for_each_slot_is_refused():
    with pytest.raises(
        UserError, match=r"method\.server\.aggregation\.patches_per_slot=0 must be at least 1"
    ):
        LloydAggregation(patches_per_slot=0)


def test_slots_of_too_few_images_become_the_nearest_other():
    memory = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    assert shared_slots(memory, torch.tensor([5, 1, 2, 5]), min_images=3).tolist() == [0, 0, 3, 3]
    assert shared_slots(memory, torch.tensor([5, 1, 2, 5]), min_images=1).tolist() == [0, 1, 2, 3]


def test_a_memory_without_a_shared_slot_is_refused():
    with pytest.raises(UserError, match="patches of 9 different images: lower method.client.min_images"):
        shared_slots(torch.zeros(2, 1), torch.tensor([5, 1]), min_images=9)


def test_radii_are_root_mean_squares_over_all_patches_of_a_slot():
    found = pooled_radii(
        torch.tensor([1.0, 3.0, 2.0]), torch.tensor([4.0, 0.0, 9.0]), torch.tensor([0, 0, 2]), 3
    )
    overall = ((1 * 4 + 3 * 0 + 2 * 9) / 6) ** 0.5
    torch.testing.assert_close(found, torch.tensor([1.0, overall, 3.0]))


def test_radii_of_few_patches_are_drawn_to_the_usual_one():
    found = pooled_radii(
        torch.tensor([1.0, 99.0]), torch.tensor([0.0, 4.0]), torch.tensor([0, 1]), 3, prior=16
    )
    usual = 99 * 4 / 100
    expected = [(16 * usual / 17) ** 0.5, ((99 * 4 + 16 * usual) / 115) ** 0.5, usual**0.5]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_radii_of_patches_of_one_image_are_distances_to_what_two_images_hold(device):
    """Slots 0 and 1 have two images, slot 2 one: its patches, 1 around it, lie 4 from slot 1, the nearest shared."""
    merged = torch.tensor([[0.0], [3.0], [7.0]])
    uploads = [
        {"memory": merged, "counts": torch.tensor([4.0, 2.0, 3.0]), "radii": torch.tensor([1.0, 2.0, 1.0])},
        {"memory": merged, "counts": torch.tensor([4.0, 2.0, 0.0]), "radii": torch.tensor([1.0, 2.0, 0.0])},
    ]
    for own, images in zip(uploads, ([1, 1, 1], [1, 1, 0]), strict=True):
        own["image_counts"] = torch.tensor(images)
    whole, shared = (merge_radii(uploads, merged.to(device), min_images=least).cpu() for least in (1, 2))
    torch.testing.assert_close(whole, torch.tensor([1.0, 2.0, 1.0]))
    torch.testing.assert_close(shared, torch.tensor([1.0, 2.0, (1 + 4**2) ** 0.5]))


def test_a_vector_beside_its_slot_widens_it():
    """By how far it lies off, beside its own radius; slots of too few images look at others only if some have more."""
    one = {
        "memory": torch.tensor([[2.0], [9.0]]),
        "counts": torch.ones(2),
        "radii": torch.tensor([3.0, 1.0]),
        "image_counts": torch.ones(2, dtype=torch.int64),
    }
    for min_images in (1, 2):
        found = merge_radii([one], torch.tensor([[0.0], [9.0]]), min_images=min_images)
        torch.testing.assert_close(found, torch.tensor([(9 + 4) ** 0.5, 1.0]))


def test_vectors_of_one_client_in_one_slot_may_show_the_same_image():
    """Two vectors of one image each, merged to a slot, are not two images."""
    one = {
        "memory": torch.tensor([[-1.0], [1.0], [9.0]]),  # the first two lie 1 from slot 0
        "counts": torch.ones(3),
        "radii": torch.zeros(3),
        "image_counts": torch.tensor([1, 1, 2]),
    }
    found = merge_radii([one], torch.tensor([[0.0], [9.0]]), min_images=2)
    torch.testing.assert_close(found, torch.tensor([(1 + 9**2) ** 0.5, 0.0]))
