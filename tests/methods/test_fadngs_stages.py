"""FADngs on images that come in stages: which of those at hand are predicted normal."""

from lit_fedad.contracts import Context
from lit_fedad.methods.fadngs import COVARIANCE, MEAN, FADngsClient, ShareDensities


def test_images_of_a_new_stage_are_judged_in_place_of_the_last_ones(make_contrastive, make_images):
    client = FADngsClient(make_contrastive())
    client.context = Context(seed=0, round=1, client=0)
    first = ShareDensities().send(client, make_images())
    client.task.densities.set(first[MEAN], first[COVARIANCE])
    client.context = Context(seed=0, round=2, client=0, stage=1)
    client.refresh(make_images(seed=1))
    assert client.task._anomalous.tolist()
    assert min(client.task._anomalous) >= 100  # positions of the new images
