import pytest

from lit_fedad.core.unread import unread


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("feddymem", ["backbone=resnet18", "grid=28"], []),
        ("feddymem", ["features=frozen", "public=synthetic"], ["features=frozen", "public=synthetic"]),
        ("feddymem", ["encoder=resnet18"], ["encoder=resnet18"]),
        ("fadngs", ["public=synthetic", "distillation=small", "warmup=2", "features=frozen"], []),
        ("fadngs", ["features=frozen", "backbone=resnet18"], []),
        ("fadngs", ["features=train", "backbone=resnet18"], ["backbone=resnet18"]),
        ("fedvck", ["condensation=small", "condensation.contrast=1.0"], []),
        ("feddm", ["condensation.steps=3", "condensation.contrast=1.0"], ["condensation.contrast=1.0"]),
        ("feddymem", ["calibration.share=0.3", "evaluation.client_test=balanced"], ["evaluation.client_test=balanced"]),
        ("gldp", ["calibration.share=0.3", "evaluation.client_test=balanced"], ["calibration.share=0.3"]),
        ("feddymem", ["public=null", "seed=3", "task.slots=9"], []),
    ],
)  # fmt: skip
def test_settings_that_nothing_refers_to_are_found(method, given, expected):
    assert unread([f"method={method}", *given]) == expected
