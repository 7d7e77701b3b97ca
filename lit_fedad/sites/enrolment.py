"""The first exchange with sites: who they are, how many images they hold, and whether all have the same settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import lit_fedad
from lit_fedad.contracts.state import state_of
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import locate, takes
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, stored_text, unwritable_in_one_line
from lit_fedad.core.plain_values import plain_json
from lit_fedad.data.public import synthetic
from lit_fedad.data.stream import Timetable
from lit_fedad.experiment.build import Model, tells_products
from lit_fedad.sites.messages import MOST_ENTRIES, MOST_PRODUCTS, Facts, are_products
from lit_fedad.sites.overrides import agreed_hash
from lit_fedad.sites.remote import Sites
from lit_fedad.sites.states import digest_of


@dataclass(frozen=True)
class SiteSizes:
    """What the server knows of the sites' training data (`ClientData`): how many images there are.

    Attributes:
        by_stage: Numbers of training images by client and stage.
        timetable: Rounds in which stages begin; None if all images of all sites are there from the start.
        stages: Current stage of each client.
        of_all: Whether the sizes are over all stages instead of the current one.
    """

    by_stage: Mapping[int, Sequence[int]]
    timetable: Timetable | None
    stages: Mapping[int, int]
    of_all: bool = True

    @classmethod
    def of(cls, facts: Mapping[int, Facts], rounds: int) -> SiteSizes:
        """Counts the images of sites, in a federation of so many rounds."""
        by_stage = {client: site.stage_sizes or [0] for client, site in sorted(facts.items())}
        lengths = list(map(len, by_stage.values()))
        timetable = Timetable(lengths, rounds) if max(lengths) > 1 else None
        return cls(by_stage, timetable, dict.fromkeys(by_stage, 0))

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which sites go on to their next stages."""
        return frozenset() if self.timetable is None else self.timetable.milestones

    @property
    def sizes(self) -> Mapping[int, int]:
        """Numbers of training images by client."""
        if self.of_all:
            return {client: sum(stages) for client, stages in self.by_stage.items()}
        return {client: self.by_stage[client][stage] for client, stage in self.stages.items()}

    def at(self, round: int) -> SiteSizes:
        """Returns what the sites hold in a round."""
        if self.timetable is None:
            return self
        return replace(self, stages=dict(enumerate(self.timetable.stages(round))), of_all=False)

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Refuses: a server holds no images.

        Raises:
            UserError: Always.
        """
        raise UserError("the coordinator holds no images: this needs those of its sites")


def check_crosses(config: Config, classes: Sequence[str] = ()) -> None:
    """Checks that a federation's configuration works with sites.

    Raises:
        UserError: If its method or task needs data that no site shares, or the classes that it learns are not named.
    """
    name, server = config["method"]["name"], config["method"]["server"]
    if takes(server, "server_labelled"):
        raise UserError(
            f"method={name}: its server needs labelled images of its own, and a coordinator of sites has none; train it"
            " in one process: lit-fedad train"
        )
    public = config.get("public")
    if takes(server, "public") and public is not None and not _drawn(public):
        raise UserError(
            "public: nobody can see whether images of the coordinator are also a site's; give public=synthetic, which"
            " draws them"
        )
    learns = takes(config["task"], "classes")
    if learns and len(set(classes)) < 2:
        raise UserError(f"method={name}: its task learns classes; name all that sites hold: classes=cat,dog")
    if not are_products(classes):
        raise UserError(
            f"classes: give at most {MOST_PRODUCTS} different names, of printable characters, 100 at most"
        )
    if classes and not learns:
        raise UserError(f"classes: the task of method={name} learns none; leave them out")


def _drawn(public: Config) -> bool:
    """Tells whether public images are generated, so that no site can hold them."""
    return locate(public["_target_"]) is synthetic or ("root" in public and public["root"] is None)


ABSENT = Facts()
"""Facts that stand for a site that takes no part: it has no images."""


def facts_to_agree(config: Config, model: Model) -> dict[str, Any]:
    """Returns the facts in which a site and the coordinator must agree, by name of a field of `Facts`."""
    return {
        "version": lit_fedad.__version__,
        "configuration": agreed_hash(config),
        "backbone": model.fingerprint[:16],
        "initial": digest_of([state_of(model.client), learned_state(model.task)]),
    }


def differences(
    config: Config, model: Model, facts: Mapping[int, Facts], names: Mapping[int, str]
) -> dict[int, str]:
    """Finds the sites that work with another configuration, version or weights than the server, or cannot train.

    Returns:
        A line for each of these sites, by client.
    """
    first = next((site for _, site in sorted(facts.items()) if site.size), ABSENT)
    here = Facts(**facts_to_agree(config, model), anomalies=first.anomalies, form=first.form)
    lines = {
        client: _difference(site, here, config["rounds"], model.provenance)
        for client, site in sorted(facts.items())
    }
    return {client: f"site {names[client]} {line}" for client, line in lines.items() if line}


_ADVICE = {
    "configuration": (
        "composed configuration",
        "give its cache and fabric sections the values, and your own packages the files, that others have",
    ),
    "backbone": ("backbone", "give it the same file of weights: here {taken}, of {name}"),
    "initial": ("initial weights", "install the same torch and the same backbone"),
    "anomalies": ("list of sets of anomalies", "all sites have those of the first"),
    "form": ("list of classes", "all sites have that of the first"),
}


def _difference(site: Facts, here: Facts, rounds: int, backbone: Mapping[str, Any]) -> str:
    """Says in what a site differs from the server or from the first site; returns no text if it does not.

    Args:
        site: The facts of the site.
        here: The facts that they should be: the server's, and some of the first site.
        rounds: Number of rounds of the run.
        backbone: Description of the server's backbone, for the advice.
    """
    if not works_with(here.version, site.version):
        return f"has another version of lit_fedad ({site.version}, here {here.version}); install the same everywhere"
    for field, (what, correction) in _ADVICE.items():
        theirs, ours = getattr(site, field), getattr(here, field)
        if theirs != ours:
            advice = correction.format(**backbone)
            return f"has another {what} ({theirs or 'none'}, here {ours or 'none'}); {advice}"
    if not site.size or not all(site.stage_sizes):
        return "has no image to train with; give it some, or leave it out"
    if len(site.stages) > max(rounds, 1):
        return f"has images in {len(site.stages)} stages, and rounds={rounds}: give at least as many rounds"
    return ""


def works_with(here: str, there: str) -> bool:
    """Tells whether a coordinator works with sites of a version: its own minor version, or the one before it.

    Example:
        >>> [works_with("0.4.1", there) for there in ("0.4.0", "0.3.2", "0.2.0", "0.5.0", "1.4.1", "?")]
        [True, True, False, False, False, False]
    """
    try:
        (major, minor), (site_major, site_minor) = (map(int, v.split(".")[:2]) for v in (here, there))
    except ValueError:
        return False
    return major == site_major and minor - site_minor in (0, 1)


_MOST_SHARE = 0.9
"""Share of all images above which there is a warning of a site: nobody can check its number, and its messages weigh by
it."""


def enrol(
    sites: Sites,
    config: Config,
    model: Model,
    file: Path,
    joinable: bool,
    known: Mapping[int, Facts],
) -> tuple[dict[int, Facts], list[str]]:
    """Asks sites who they are, and settles which products the model tells apart: those of the first sites of the run.

    The facts that sites give are stored. If the run's policy is to skip clients that fail, it begins or goes on without
    sites that are away or differ. A site that has been in the run takes part again once it answers; another one joins.

    Args:
        sites: The transport.
        config: The server's configuration.
        model: The server's model.
        file: File with the facts of the sites that have been in the run; written here.
        joinable: Whether sites that have not been in the run can join it.
        known: Facts of sites that need not be asked, by client.

    Returns:
        The facts by client, `ABSENT` for sites that take no part; and warnings.

    Raises:
        UserError: If a site is away or differs and the run does not go on without it, if no site is left, or if the
            file cannot be read.
    """
    names = dict(enumerate(sites.names))
    before, settled = _read(file, names)
    outcome = sites.hello([client for client in names if client not in known])
    answered = {client: reply.facts for client, reply in outcome.values.items()}
    all_facts = dict(known) | answered
    away = {client: f"site {names[client]}: {cause}" for client, cause in outcome.failures.items()}
    differing = differences(config, model, all_facts, names)
    if not joinable:
        late = "was not in this run from its beginning, and cannot join: another out in federation.yaml is another run"
        differing |= {c: f"site {names[c]} {late}" for c in answered if c not in before}
    if settled:  # also before the first checkpoint: a site's claims hold the run's products already
        late = "has products that no site had when this run began, which its model does not tell apart: begin another"
        differing |= {
            c: f"site {names[c]} {late}" for c, site in answered.items() if not set(site.held) <= set(settled)
        }
    good = {client: site for client, site in all_facts.items() if client not in differing}
    trouble = away | differing
    if trouble and (config["federation"]["sampler"]["on_failure"] != "skip" or not good):
        raise UserError("; ".join(trouble.values()))
    sites.left_out = differing
    returning = {client: site for client, site in before.items() if client in away}
    sites.absent = {client: cause for client, cause in trouble.items() if client not in returning}
    facts = dict.fromkeys(names, ABSENT) | returning | good
    warnings = [
        f"{line}; the run goes on"
        + (", and it takes part again when it answers" if client in returning else "")
        for client, line in trouble.items()
    ]
    held = list(dict.fromkeys(product for site in facts.values() for product in site.held))
    if tells_products(config):
        sites.told_apart = held = settled or held
    _check_number(held, facts, names, MOST_PRODUCTS if tells_products(config) else MOST_ENTRIES)
    sites.products = list(sites.asked.classes) or held
    write_facts(file, before | good, names, sites.told_apart)
    return facts, warnings + _doubts(good, facts, names)


def _check_number(
    products: Sequence[str], facts: Mapping[int, Facts], names: Mapping[int, str], most: int
) -> None:
    """Refuses more products than a model tells apart, or than a message names; names the site that has most."""
    if len(products) <= most:
        return
    client = max(facts, key=lambda client: len(facts[client].held))
    other = (
        "" if most == MOST_ENTRIES else ", or give a method that tells none apart, such as method=feddymem"
    )
    raise UserError(
        f"sites name {len(products)} products, and at most {most} take part in such a run; site {names[client]} names"
        f" most, {len(facts[client].held)}: leave some out (data.products at the sites){other}"
    )


def _doubts(
    answering: Mapping[int, Facts], facts: Mapping[int, Facts], names: Mapping[int, str]
) -> list[str]:
    """Returns warnings of sites with other versions than here, and of one that says it has nearly all images."""
    here = {"torch": torch.__version__, "lit_fedad": lit_fedad.__version__}
    lines = [
        f"site {names[client]} has {package} {theirs}, here is {here[package]}: last digits may differ"
        for client, site in sorted(answering.items())
        for package, theirs in (("torch", site.torch), ("lit_fedad", site.version))
        if theirs != here[package]
    ]
    total = sum(site.size for site in facts.values())
    return lines + [
        f"site {names[client]} says that it has {site.size} of all {total} images: the merged model is nearly its own;"
        " ask its operator"
        for client, site in sorted(facts.items())
        if _MOST_SHARE * total < site.size < total
    ]


def write_facts(
    file: Path, facts: Mapping[int, Facts], names: Mapping[int, str], products: Sequence[str]
) -> None:
    """Writes the facts of the sites that have been in a run, and the products that its model tells apart.

    Raises:
        UserError: If the file cannot be written.
    """
    content = {names[client]: {"client": client, **asdict(site)} for client, site in sorted(facts.items())}
    with unwritable_in_one_line(file), atomic(file, durable=True) as partial:
        partial.write_text(json.dumps({"products": list(products), "sites": content}, indent=1))


def _read(file: Path, names: Mapping[int, str]) -> tuple[dict[int, Facts], list[str]]:
    """Reads the facts of the sites that have been in the run, and the products that its model tells apart."""
    if not file.exists():
        return {}, []
    try:
        content = plain_json(stored_text(file))
        said, products = content["sites"], content["products"]
        numbers = {name: own.pop("client") for name, own in said.items()}
        facts = {numbers[name]: Facts.read(own) for name, own in said.items()}
        if not (isinstance(products, list) and are_products(products)):
            raise ValueError("no names of products")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError) as error:
        raise UserError(
            f"{file}: cannot be read; remove it, and begin again once all sites answer"
        ) from error
    if moved := [name for name, client in numbers.items() if names.get(client) != name]:
        raise UserError(
            f"sites: {moved[0]} has been in this run and keeps its place; remove its key instead, and"
            " add others at the end"
        )
    return facts, products
