"""Which keys identify a run, and which decide how it is judged."""

from __future__ import annotations

from lit_fedad.core.config import Config, compose
from lit_fedad.core.identity import identity, judgement
from lit_fedad.core.nested import flatten


def changed(config: Config, key: str) -> Config:
    """The same configuration with another value of a key."""
    first, _, rest = key.partition(".")
    return {**config, first: changed(config[first], rest) if rest else "another"}


# Where and how a run happens, and keys that no default run reads.
CIRCUMSTANCES = {"out", "tracking", "fabric", "simulation", "cache", "fresh", "callbacks"}
DECISIVE = {"fabric.precision", "cache.enabled"}
JUDGING = {"evaluation.alone", "evaluation.alpha", "evaluation.pictures", "evaluation.batch_size"}
UNREAD = {"image.overlap", "evaluation.spro_limit"}


def test_identity_changes_with_every_key_that_decides_a_result_and_no_other():
    config = compose()
    keys = flatten(config).keys()
    alike = {key for key in keys if identity(changed(config, key)) == identity(config)}
    circumstances = {key for key in keys if key.partition(".")[0] in CIRCUMSTANCES} - DECISIVE
    assert alike == circumstances | JUDGING | UNREAD


def test_only_keys_of_decisions_and_pictures_change_the_judgement():
    config = compose()
    others = {key for key in flatten(config) if judgement(changed(config, key)) != judgement(config)}
    assert others == JUDGING - {"evaluation.batch_size"}
