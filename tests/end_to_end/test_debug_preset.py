"""`debug=seconds` runs every part of a method once, also those that begin in later rounds."""

import importlib

import pytest
from helpers.nightly import by_method
from torch import Tensor

from lit_fedad.cli.main import main

# Of methods with parts that begin after round 1, or before it: what must have been called.
PARTS = {
    "fadngs": [
        "tasks.contrastive_losses.SimCLR.forward",  # the warm-up
        "tasks.contrastive_losses.CRAD.forward",  # FADngs Eq. 7 to Eq. 9
        "tasks.contrastive.Contrastive.estimate",  # NGDE: FADngs Eq. 1 to Eq. 3
        "tasks.contrastive.Contrastive.select",
        "methods.parts.ensemble_distillation.EnsembleDistillation.__call__",  # SED: FADngs Eq. 11 to Eq. 13
    ],
    "fadngs_code": [
        "tasks.contrastive_losses.CRADCode.forward",
        "methods.parts.ensemble_distillation.EnsembleDistillation.__call__",
    ],
    "elsa": [
        "tasks.contrastive_losses.SimCLR.forward",
        "tasks.elsa.Elsa.cluster",
        "methods.elsa.Centres.send",
    ],
    "deep_svdd": ["tasks.deep_svdd.DeepSVDD.reconstructing", "tasks.deep_svdd.DeepSVDD.distances"],
    "dbe": ["methods.dbe.FeatureMean.train", "methods.dbe.FeatureMean.aggregate"],
    "fedavg task=one_class_svm experiment=semantic_small": [
        "tasks.deep_svdd.Bottleneck.errors",  # trained together
        "tasks.one_class_svm.OneClassSVM.trains_svm_alone",
    ],
    "fedgen": ["methods.fedgen.FedGenServer.learn", "methods.fedgen.FeatureGenerator.forward"],
    "gldp": [
        "methods.gldp.GLDPClient.training_step",
        "methods.gldp.local_relation",  # GLDP Eq. 7, to prototypes of an earlier stage (GLDP Eq. 9)
        "methods.gldp.global_relation",  # GLDP Eq. 10
        "methods.gldp.GLDPServer.aggregate",
        "methods.gldp.GLDPClient.predict_step",
    ],
}


def resolve(name: str) -> tuple[object, str]:
    """The class or module of a dotted name below the package, and the attribute."""
    module, owner, attribute = name.rsplit(".", 2)
    if owner.islower():
        return importlib.import_module(f"lit_fedad.{module}.{owner}"), attribute
    return getattr(importlib.import_module(f"lit_fedad.{module}"), owner), attribute


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
@pytest.mark.parametrize("command", by_method(PARTS))
def test_every_part_runs_once(tmp_path, monkeypatch, command):
    called = set()

    def spy(name: str) -> None:
        owner, attribute = resolve(name)
        known = vars(owner)[attribute]
        plain = known.fget if isinstance(known, property) else known

        def note(*arguments, **named):
            result = plain(*arguments, **named)
            told = isinstance(known, property) or (isinstance(result, Tensor) and result.ndim == 0)
            if not told or result:  # a property must have been true, a term of the loss not 0
                called.add(name)
            return result

        monkeypatch.setattr(owner, attribute, property(note) if isinstance(known, property) else note)

    for name in PARTS[command]:
        spy(name)
    words = f"method={command} debug=seconds tracking=off cache.enabled=false evaluation.pictures=0".split()
    assert main(["train", *words, f"out={tmp_path}"]) in (0, None)
    assert called == set(PARTS[command])
