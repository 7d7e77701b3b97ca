"""A bank under differential privacy: what an image adds by slot, what sums say of slots, the model they make."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from helpers.summed_bank import summed_bank
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.errors import UserError
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.memory.merge import LloydAggregation
from lit_fedad.methods.federated_bank import FederatedBankClient, FederatedBankServer
from lit_fedad.methods.parts.noised_bank import PRIOR, ImageSlots, NoisedSlots
from lit_fedad.methods.parts.noised_subspace import public_frame
from lit_fedad.privacy.image_privacy import ImagePrivacy, mu_of
from lit_fedad.privacy.noised_sums import clipped_parts, clipped_sum, gaussian
from lit_fedad.privacy.secure_aggregation import SecureSum
from lit_fedad.tasks.slot_distances import LocalScale, NearestDistance

KEY = b"secret".ljust(32)
SLOTS, DIRECTIONS = 6, 5


def bank(**changes):
    settings = {
        "score": NearestDistance(),
        "image_score": LocalScale(1.0),
        "slots": SLOTS,
        "average_pool": True,
        "maps": "subspace",
    }
    return summed_bank(**{**settings, **changes})


def looking(task, frame, directions=DIRECTIONS):
    """A client that looks along so many directions of a frame."""
    return SimpleNamespace(task=task, directions=directions, frame=frame)


def play(
    federate, data, rounds=1, epsilon=1e14, folder=None, secure_sum=None, task=None, min_images=2, **privacy
):
    return federate(
        FederatedBankClient,
        FederatedBankServer,
        task=task or bank(),
        data=data,
        rounds=rounds,
        folder=folder,
        secure_sum=secure_sum,
        sampler=ClientSampler(on_failure="skip"),
        client={"slots_from_moments": True, "noised_directions": DIRECTIONS, "min_images": min_images},
        server={"aggregation": LloydAggregation()},
        privacy=ImagePrivacy(epsilon=epsilon, **privacy),
        noise_key=KEY,
    )


def model(found):
    return found.server.broadcast(0)


@pytest.fixture
def data(make_loader):
    return {client: make_loader(size, client) for client, size in enumerate((6, 5, 9))}


@pytest.fixture
def slots():
    """Public frame, drawn slots and directions of residuals."""
    centre, frame = public_frame(bank(), DIRECTIONS)
    draw = torch.Generator().manual_seed(3)
    return {
        "centre": centre.float(),
        "frame": frame.float(),
        "slots": 0.4 * torch.randn(SLOTS, DIRECTIONS, generator=draw),
        "outside": torch.randn(DIRECTIONS, 2, generator=draw),
    }


def projected(held, data):
    """Projected patches by image, NumPy float64 [n, P, k]."""
    task = bank()
    rows = torch.cat([task.embed(batch) for loader in data.values() for batch in loader]).double()
    return ((rows - held["centre"].double()) @ held["frame"].double()).numpy()


def by_hand(image, slots, outside):
    """What one image adds, patch by patch."""
    counts, offsets, squares = np.zeros(len(slots)), np.zeros_like(slots), np.zeros(len(slots))
    for patch in image:
        at = int(np.argmin(((patch - slots) ** 2).sum(1)))
        counts[at] += 1 / len(image)
        offsets[at] += (patch - slots[at]) / len(image)
        squares[at] += ((patch @ outside) ** 2).sum() / len(image)
    length = np.sqrt((counts**2).sum() + (offsets**2).sum() + (squares**2).sum())
    return counts / length, offsets / length, squares / length


def test_every_image_adds_shares_offsets_and_squares_by_slot_at_length_one(data, slots):
    own = [
        by_hand(image, slots["slots"].double().numpy(), slots["outside"].double().numpy())
        for image in projected(slots, data)
    ]
    loader = DataLoader([row for held in data.values() for row in held.dataset], batch_size=3)
    found = clipped_sum(ImageSlots(looking(bank(), slots)), loader, 1.0)
    for name, parts in zip(("counts", "offsets", "squares"), zip(*own, strict=True), strict=True):
        np.testing.assert_allclose(found[name], sum(parts), rtol=1e-3, atol=1e-4)


@given(seed=st.integers(0, 10**6), factor=st.sampled_from([0.0, 1e-6, 1.0, 1e3, 1e9]), clip=st.floats(0.1, 2))
def test_an_image_never_adds_more_than_the_clip(slots_of_module, seed, factor, clip):
    task, held = slots_of_module
    image = factor * torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    sums = ImageSlots(looking(task, held))
    (parts,) = clipped_parts(sums, [{"image": image}], clip)
    squares = sum(part.flatten(1).square().sum(1) for part in parts.values())
    assert float(squares.max().sqrt()) <= min(1.0, clip) * (1 + 1e-6)
    assert float(parts["counts"].max()) <= 1  # so that a count says how many images there are at least


@pytest.fixture(scope="module")
def slots_of_module():
    task = bank()
    centre, frame = public_frame(task, DIRECTIONS)
    draw = torch.Generator().manual_seed(4)
    held = {"slots": torch.randn(SLOTS, DIRECTIONS, generator=draw), "outside": torch.eye(DIRECTIONS)[:, 2:]}
    return task, {"centre": centre.float(), "frame": frame.float(), **held}


@given(seed=st.integers(0, 10**6), noise=st.floats(0, 3), least=st.integers(2, 6))
def test_what_sums_say_of_slots_by_independent_arithmetic(seed, noise, least):
    draw = np.random.default_rng(seed)
    counts, offsets = draw.uniform(0, 40, 4), draw.normal(0, 5, (4, 3))
    squares = draw.normal(10, 5, 4)
    sums = {"counts": counts, "offsets": offsets, "squares": squares}
    sums = {name: torch.from_numpy(part) for name, part in sums.items()}
    task = SimpleNamespace(average_pool=True, whiten=0.1, cosine=False, slots=4)
    one = ImageSlots(looking(task, {}, 3))
    shown = [count >= least + 3 * noise for count in counts]
    if not any(shown):
        with pytest.raises(HiddenByNoiseError):
            one.from_sums(SimpleNamespace(min_images=least), sums, noise)
        return
    found = one.from_sums(SimpleNamespace(min_images=least), sums, noise)
    assert found["shown"].tolist() == shown
    usual = max(sum(squares[shown]) / sum(counts[shown]), 1e-12)
    for slot in range(4):
        length = (offsets[slot] ** 2).sum()
        step = max(0.0, 1 - 3 * noise**2 / length) * offsets[slot] / max(counts[slot], 1)
        np.testing.assert_allclose(found["steps"][slot], step, rtol=1e-9, atol=1e-12)
        mean = max(0.0, squares[slot] + PRIOR * noise * usual) / max(1.0, counts[slot] + PRIOR * noise)
        assert float(found["squares"][slot]) == pytest.approx(mean, rel=1e-9)


def test_many_times_the_same_images_say_the_same_of_slots(data, slots):
    sums = ImageSlots(looking(bank(), slots))
    once = clipped_sum(sums, data[2], 1.0)
    server = SimpleNamespace(min_images=0)
    one, many = (
        sums.from_sums(server, {n: factor * part for n, part in once.items()}, 0.0) for factor in (5, 25)
    )
    full = one["counts"] > 1
    assert bool(full.any())
    for name in ("steps", "squares"):
        torch.testing.assert_close(one[name][full], many[name][full])


def test_a_shown_slot_has_patches_of_as_many_images(data, slots):
    images = projected(slots, data)
    at = (((images[:, :, None] - slots["slots"].double().numpy()) ** 2).sum(3)).argmin(2)
    behind = np.array([(at == slot).any(1).sum() for slot in range(SLOTS)])
    loader = DataLoader([row for held in data.values() for row in held.dataset], batch_size=4)
    sums = ImageSlots(looking(bank(), slots))
    total = clipped_sum(sums, loader, 1.0)
    for least in (2, 3, 5):
        found = sums.from_sums(SimpleNamespace(min_images=least), total, 0.0)
        assert (behind[found["shown"].numpy()] >= least).all()


def test_an_infinite_budget_is_the_plain_run(federate, data):
    plain = federate(
        FederatedBankClient,
        FederatedBankServer,
        task=bank(),
        data=data,
        rounds=2,
        client={"slots_from_moments": True, "noised_directions": DIRECTIONS},
        server={"aggregation": LloydAggregation()},
    )
    endless = play(federate, data, rounds=2, epsilon=None)
    assert endless.privacy is None
    for name, entry in model(plain).items():
        assert model(endless)[name].equal(entry)


def test_clients_load_the_model_with_the_slots_of_a_round(federate, data):
    server, client = play(federate, data).server, FederatedBankClient(bank(), slots_from_moments=True)
    exchange = NoisedSlots("slots", ImageSlots)
    exchange.receive(client, exchange.broadcast(server, 0))
    torch.testing.assert_close(client.task.memory, server.known["memory"])
    torch.testing.assert_close(client.frame["slots"], server.moments["slots"].float())


def test_the_model_measures_as_the_public_frame_does(federate, data):
    """Patches, standardised and whitened, lie as far from the bank as projected ones from the slots."""
    found = play(federate, data, rounds=0)
    sent = model(found)
    task = bank()
    task.load_statistics(sent["mean"], sent["scale"], sent["whitening"])
    rows = torch.cat([task.embed(batch) for loader in data.values() for batch in loader]).flatten(0, 1)
    own = torch.cdist(task.standardised(rows).double(), sent["memory"].double())
    held = found.server.moments
    expected = torch.cdist((rows.double() - held["centre"]) @ held["frame"], held["slots"])
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(held["frame"], public_frame(bank(), DIRECTIONS)[1], rtol=1e-4, atol=1e-5)
    assert float(held["product"].trace()) == pytest.approx(1)


@pytest.mark.parametrize("secure", [False, True])
def test_a_round_is_a_step_of_weighted_means(federate, data, secure):
    privacy = {"where": "distributed", "secure_sum": SecureSum()} if secure else {}
    first = play(federate, data, rounds=0).server.moments
    found = play(federate, data, **privacy)
    slots, unit = first["slots"].numpy(), float(first["unit"])
    parts = [
        by_hand(image, slots, first["outside"].numpy() / unit)
        for image in projected({name: first[name] for name in ("centre", "frame")}, data)
    ]
    counts, offsets, squares = (0.5 * sum(part) for part in zip(*parts, strict=True))  # clipped to 1/2
    shown = counts >= 2
    assert shown.sum() > 0
    moved = slots[shown] + offsets[shown] / counts[shown][:, None]
    radii = unit * np.sqrt(squares[shown] / counts[shown])
    left, _, right = np.linalg.svd(first["frame"].numpy(), full_matrices=False)
    # (A A^T)^(1/2) f = U S U^T f and A^T f = V S U^T f, for A = U S V^T.
    memory = model(found)["memory"].double().numpy()[shown] @ left @ right
    np.testing.assert_allclose(memory, moved, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(model(found)["radii"].numpy()[shown], radii, rtol=1e-2)
    assert found.server.diagnostics()["shown_slots"] == shown.sum()
    # Those that do not show are copies of the nearest that does.
    copies = model(found)["memory"][~torch.from_numpy(shown)]
    assert all(bool((copy == model(found)["memory"][shown]).all(1).any()) for copy in copies)


def test_shares_of_the_noise_add_up_to_what_the_server_would_add(federate, data):
    found = play(federate, data, epsilon=1e4, where="distributed", secure_sum=SecureSum())
    (exchange,) = found.exchanges.rounds
    client, plan = found.client, found.plan
    client.frame = {name: found.server.moments[name] for name in ("centre", "frame", "slots", "outside")}
    sums = exchange.sums.by_image(client)
    total, expected = {}, {}
    for number, loader in data.items():
        client.context = Context(0, 1, number)
        sent = exchange.send(client, loader)
        noise = gaussian(KEY, client.context, sums.shapes(), plan.noise.share)
        plain = clipped_sum(sums, loader, plan.settings.clip)
        for name, part in sent.items():
            total[name] = total.get(name, 0) + part
            expected[name] = expected.get(name, 0) + plain[name] + noise[name]
    for name, part in total.items():
        torch.testing.assert_close(part, expected[name])
    # Two of three clients carry the whole noise: three bring half as much variance more.
    assert plan.carriers * plan.noise.share**2 == pytest.approx(plan.noise.deviation**2)


def test_the_order_of_clients_does_not_matter(federate, data):
    one = play(federate, data, rounds=2, epsilon=1e6)
    other = play(federate, {2 - client: loader for client, loader in data.items()}, rounds=2, epsilon=1e6)
    for name, entry in model(one).items():
        if name != "basis":  # its directions may be reflected
            torch.testing.assert_close(model(other)[name], entry, rtol=1e-2, atol=1e-3)
    ours, theirs = (model(found)["basis"][0] for found in (one, other))
    torch.testing.assert_close(theirs @ theirs.T, ours @ ours.T, rtol=1e-2, atol=1e-2)


def test_identical_clients_are_one_with_their_images_together(federate, make_loader):
    loader = make_loader(7, 5)
    alike = play(federate, dict.fromkeys(range(3), loader), rounds=1, epsilon=1e6)
    one = play(federate, {0: DataLoader([*loader.dataset] * 3, batch_size=4)}, rounds=1, epsilon=1e6)
    for name in ("mean", "whitening", "memory", "radii"):
        torch.testing.assert_close(model(one)[name], model(alike)[name], rtol=1e-2, atol=1e-3)
    assert one.server.diagnostics() == alike.server.diagnostics()


def test_every_round_is_a_noised_sum_of_the_budget(federate, data):
    found = play(federate, data, rounds=2, epsilon=1e6)
    assert [report.noised_sums for report in found.history] == [1, 1, 1, 1, 1]
    assert found.privacy["sums"] == 5
    assert found.privacy["epsilon"] == pytest.approx(1e6, rel=1e-6)
    assert found.privacy["noise"] == pytest.approx(5**0.5 / mu_of(1e6, 1e-5), rel=1e-6)
    found.history[0].noised_sums = 9
    with pytest.raises(UserError, match="needs epsilon .* and the budget is 1e\\+06"):
        found.play(1)


def test_a_resumed_run_replays_the_same_noise(federate, data):
    first = play(federate, data, rounds=2, epsilon=1e6, folder="one")
    again = play(federate, data, rounds=2, epsilon=1e6, folder="two")
    resumed = play(federate, data, rounds=2, epsilon=1e6, folder="one")
    assert resumed.privacy == first.privacy
    for name, entry in model(first).items():
        assert model(again)[name].equal(entry)
        assert model(resumed)[name].equal(entry)


def test_what_a_noised_bank_cannot_be_made_of_is_refused_in_one_line(federate, data):
    for changes in ({"average_pool": "last"}, {"whiten": None}, {"distance": "cosine"}):
        with refusal(r"give task\.average_pool=true, .*federated_bank"):
            play(federate, data, task=bank(**changes))
    with pytest.raises(UserError, match="hides the images"):
        play(federate, data, epsilon=0.01)
    with pytest.raises(UserError, match=r"hides the images; .* or fewer task\.slots"):
        play(federate, data, min_images=20)
    with pytest.raises(UserError, match=r"method\.client\.noised_directions"):
        FederatedBankClient(bank(), noised_directions=1)
    with pytest.raises(UserError, match=r"task\.maps=slots: give bank, or subspace"):
        bank(maps="slots")
    with pytest.raises(UserError, match=r"task\.maps=subspace: give bank, or subspace where"):
        bank(subspace=None)
