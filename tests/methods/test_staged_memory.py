"""Memories of data that come in stages: what slots count, whichever rule makes them and however often stages come."""

import os
from dataclasses import dataclass

import pytest
import torch
from helpers.methods import federation_of
from helpers.summed_bank import summed_bank
from helpers.tiny_pyramid import TinyPyramid
from torch.utils.data import Dataset

from lit_fedad.contracts import Update
from lit_fedad.contracts.message import LARGEST
from lit_fedad.contracts.state import load_state
from lit_fedad.core.errors import UserError
from lit_fedad.data.stream import StreamDataModule
from lit_fedad.federation.evaluator import Evaluator, LocalQuery
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.memory.merge import KMeansAggregation, LloydAggregation
from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.methods.fedavg import FedAvgServer
from lit_fedad.methods.feddymem import FedDyMemClient, FedDyMemServer
from lit_fedad.methods.federated_bank import FederatedBankClient, FederatedBankServer, FirstVectors, exchanges
from lit_fedad.methods.federated_patchcore import FederatedPatchCoreClient, FederatedPatchCoreServer
from lit_fedad.methods.federated_subspace import FederatedSubspaceClient, FederatedSubspaceServer
from lit_fedad.methods.local import LocalClient
from lit_fedad.privacy.image_privacy import ImagePrivacy
from lit_fedad.tasks.subspace import Subspace

PATCHES = 16
STAGES = [[[0, 1, 2], [3], [4, 5]], [[6, 7, 8], [9], [10, 11]]]  # of two clients; the second has few images


class Images(Dataset):
    def __len__(self):
        return 12

    def __getitems__(self, indices):
        drawn = [torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in indices]
        return {"image": torch.stack(drawn), "index": torch.tensor(indices)}


class FarApart(Images):
    """Images whose later stages are 100,000 times as bright as the first."""

    def __getitems__(self, indices):
        drawn = super().__getitems__(indices)
        factors = torch.tensor([1e5 if i % 6 >= 3 else 1.0 for i in indices])
        return {**drawn, "image": drawn["image"] * factors[:, None, None, None]}


class Nobody(Evaluator):
    """Scores nothing."""

    def score(self, client, number):
        return None

    def summarise(self, states):
        return {}


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Plays as many rounds of the stages above as are asked for, and returns the federation."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def play(client, server, rounds, schedule="stage_major", images=Images, **protection):
        federation = federation_of(
            client,
            server,
            tmp_path,
            **protection,
            data=StreamDataModule(images(), images(), STAGES, rounds, schedule, batch_size=4),
            evaluator=Nobody(),
            rounds=rounds,
            evaluate_every=100,
        )
        federation.run()
        return federation

    return play


def of_sums(**changes):
    client = FederatedBankClient(summed_bank(**changes))
    return client, FederatedBankServer(client, LloydAggregation())


@pytest.mark.parametrize(
    "changes",
    [{}, {"subspace": None}, {"subspace": None, "whiten": None}],
    ids=["both", "bank", "no moments"],
)
def test_sums_count_the_images_of_all_stages(play, changes):
    """Without moments too, which tell the server how many images have come."""
    client, server = of_sums(**changes)
    play(client, server, rounds=3)
    assert client.sent["counts"].sum() == 6 * PATCHES
    assert server.known["memory"].isfinite().all()


def test_sums_of_images_far_from_the_first_stage_fit_their_message(play):
    """The first stage's statistics scale them, so that a squared residual may exceed a single value's bound."""
    client, server = of_sums()
    played = play(client, server, rounds=3, images=FarApart)
    assert server.slots_of["sum_squares"].max() > LARGEST
    counts = played.ask(
        3, LocalQuery("counts", lambda live, number: int(live.sums["counted"])), [0], sums=True
    )
    assert counts == {0: 1}


@pytest.mark.parametrize("rounds", [4, 6, 7])
def test_a_stage_that_comes_again_is_not_counted_again(play, rounds):
    """The live client has played last: its sums hold each of its six images once."""
    client, server = of_sums()
    play(client, server, rounds, schedule="literal")
    assert client.sent["counts"].sum() == 6 * PATCHES
    assert server.slots_of["sum_counts"].sum() == 12 * PATCHES


def test_radii_stay_what_they_are_where_another_subspace_judged_the_images(play):
    """Moments of a stage change the subspace after it has judged the stage's images: they cannot be taken out again."""
    client = FederatedBankClient(summed_bank(), min_images=1)
    server = FederatedBankServer(client, LloydAggregation())
    played = play(client, server, rounds=3)
    images = [Images().__getitems__([0])]  # of the first stage

    def leave(live, number):
        whole = live.task.radii.clone()
        played.exchanges.leave_out.leave_out(live, images)
        return whole, live.task.radii.clone()

    whole, radii = played.ask(3, LocalQuery("leave", leave), [0], sums=True)[0]
    assert (radii[:, None] - whole).abs().amin(1).max() < 1e-4 * whole.max()


@dataclass(frozen=True)
class Absent(ClientSampler):
    """Does not sample the second client in one round."""

    missed: int = 0

    def sample(self, clients, context):
        return [0] if context.round == self.missed else [0, 1]


# Set-up sends moments of the first stage, and rounds what slots count of it.
@pytest.mark.parametrize(
    ("missed", "images", "held"), [(1, 3, [None, True, True]), (2, 5, [True, False, True])]
)
def test_a_client_that_was_not_sampled_in_a_stage_is_merged_ever_after(play, missed, images, held):
    client, server = of_sums()
    federation = play(client, server, rounds=3, sampler=Absent(missed=missed))
    assert [report.refused for report in federation.history] == [{}] * len(federation.history)
    assert server.summed == {0: 6, 1: images}
    load_state(client, federation.pool.get(1))
    assert client.sent["counts"].sum() == images * PATCHES
    client.sums = server.model_sums(1)
    assert [exchanges(client).leave_out.holds(client, stage) for stage in range(3)] == held


def test_a_memory_that_moves_holds_the_present_stage_alone(play):
    """A stage of one image fills fewer slots than all images could."""
    task = summed_bank(reduce=SlotReduce(), subspace=None, slots=24)
    client = FedDyMemClient(task, send_counts=True)
    server = FedDyMemServer(client, KMeansAggregation(weighted=True, continued=True))
    history = play(client, server, rounds=3).history
    assert [report.participants for report in history if report.round > 0] == [[0, 1]] * 3


def test_what_nothing_trains_is_fitted_to_the_present_stage(play):
    """Alone, as banks are that are built anew; the last client's last stage has images 10 and 11."""
    torch.manual_seed(0)
    task = Subspace(TinyPyramid(), share=0.9, grid=4, image_size=32)
    client = LocalClient(task)
    play(client, FedAvgServer(client), rounds=6)
    rows = task.embed(Images().__getitems__([10, 11])).flatten(0, 1)
    torch.testing.assert_close(task.centre[0], rows.mean(0), rtol=1e-4, atol=1e-4)


# In turns, the fourth of four rounds has the first stage again.
IN_TURNS = pytest.mark.parametrize(("schedule", "rounds"), [("stage_major", 3), ("literal", 4)])


@IN_TURNS
def test_a_bank_that_is_made_before_round_1_says_that_it_knows_the_first_stage_alone(play, schedule, rounds):
    client = FederatedPatchCoreClient(
        summed_bank(subspace=None, whiten=None, standardise=False, image_score=None)
    )
    with pytest.warns(
        UserWarning, match="images come in stages, and this method looks at those of the first"
    ):
        play(client, FederatedPatchCoreServer(client), rounds, schedule)


@pytest.mark.parametrize(("changes", "fixed"), [({"whiten": None}, "statistics"), ({}, "moments")])
def test_what_is_set_up_of_the_first_stage_and_never_renewed_is_said(play, changes, fixed):
    """Rounds bring no moments then, as nothing would be made of them."""
    client = FedDyMemClient(summed_bank(subspace=None, **changes), send_counts=True)
    with pytest.warns(UserWarning, match=rf"before round 1 \({fixed}\) is of the first alone"):
        play(client, FedDyMemServer(client, KMeansAggregation()), 3)
    assert "covariance" not in client.upload_spec()


@pytest.mark.parametrize(
    ("changes", "names"), [({}, {"memory", "counts"}), ({"subspace": None}, {"memory", "counts", "radii"})]
)
def test_radii_of_the_first_memory_are_sent_where_they_are_used(changes, names):
    """Beside a subspace slots have radii once residuals are known, after round 1."""
    client = FederatedBankClient(summed_bank(**changes), min_images=1)
    (first,) = [one for one in exchanges(client).setup if one.name == "memory"]
    assert first.upload_spec(client).keys() == names


@IN_TURNS
def test_noise_is_refused_where_images_come_in_stages(play, schedule, rounds):
    client = FederatedSubspaceClient(Subspace(TinyPyramid(), share=0.9, grid=4, image_size=32))
    with pytest.raises(UserError, match="data that come in stages are not accounted for"):
        play(client, FederatedSubspaceServer(client), rounds, schedule, privacy=ImagePrivacy(epsilon=8.0))


@pytest.mark.parametrize("share", [1, 1.0])
def test_a_whole_share_of_variance_is_a_number_however_it_is_written(share):
    client, _ = of_sums(subspace=share)
    assert exchanges(client).leave_out is not None


@pytest.mark.parametrize(("clients", "vectors"), [(1, 12), (3, 8), (5, 5)])
def test_clients_share_the_vectors_of_the_first_memory(clients, vectors):
    """Together they send twice as many as there are slots; none sends more than there are."""
    client = FederatedBankClient(summed_bank(slots=12), min_images=1, oversampling=2.0)
    server = FederatedBankServer(client, LloydAggregation())
    server.register_clients(dict.fromkeys(range(clients), 9))
    assert server.first_vectors == vectors
    with pytest.raises(UserError, match=f"the client sent 13 vectors instead of {vectors}"):
        FirstVectors().validate(server, 0, Update({"memory": torch.zeros(13, 4)}, 9))
