"""One forged message among honest ones: what it does to the server, and to the honest rounds after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from helpers.fuzz.declared import Honest
from helpers.fuzz.record import Moment, Recording
from lit_fedad.contracts import Update
from lit_fedad.contracts.state import load_state, state_of
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.federation.client_runner import ordered_loader

FLOOR = 1e-2
"""Magnitude below which values count as equally small, as on receipt."""


class Verdict(StrEnum):
    """What became of a forged message."""

    REJECTED = "rejected"
    UNSEEN = "no visible effect"
    SHIFTED = "shifted"
    POISONED = "poisoned"
    UNUSABLE = "unusable"
    BLAMED = "honest client refused"
    CRASHED = "crashed"


BAD = (Verdict.POISONED, Verdict.UNUSABLE, Verdict.BLAMED, Verdict.CRASHED)


@dataclass(frozen=True)
class Found:
    """A verdict, and why."""

    verdict: Verdict
    why: str = ""


State = dict[str, Tensor]


class Stage:
    """A recorded run on which forged messages are played.

    Args:
        recording: The run; its server and live client are used up.
        turns: Whether an honest client plays its next turn on what the server sends after a forged message.
    """

    def __init__(self, recording: Recording, turns: bool = True) -> None:
        self.recording, self.turns = recording, turns
        federation = recording.federation
        self.federation, self.receiver = federation, federation.receiver
        self.server, self.client = federation.server, federation.client
        self._honest: dict[int, State] = {}
        self._without: dict[tuple[int, int], State] = {}

    def honest(self, index: int, client: int) -> Honest:
        """What a client that lies in a moment can start from."""
        moment = self.recording.moments[index]
        self._restore(moment)
        spec = moment.exchange.upload_spec(self.client)
        messages = {c: self.receiver.link.unpack(b, spec, "a client") for c, b in moment.blobs.items()}
        own = messages.pop(client)
        return Honest(own, spec, list(messages.values()), moment.exchange.broadcast(self.server, client))

    def play(self, index: int, client: int, blob: bytes) -> Found:
        """Plays a moment with the bytes of one client forged, and honest messages after it."""
        moment = self.recording.moments[index]
        self._restore(moment)
        try:
            updates, refused = self._open(moment, {**moment.blobs, client: blob})
        except Exception as error:
            return Found(Verdict.CRASHED, f"open: {type(error).__name__}: {first_line(error)}")
        if set(refused) - {client}:
            return Found(Verdict.BLAMED, str(refused))
        if client in refused:
            return Found(Verdict.REJECTED, refused[client])
        try:
            merged = self._merge(moment, updates)
        except Exception as error:
            if len(updates) == 1 and isinstance(error, UserError):
                return Found(Verdict.REJECTED, str(error))  # there is nobody else to merge
            return Found(Verdict.CRASHED, f"merge: {type(error).__name__}: {first_line(error)}")
        if set(merged.refused) - {client}:
            return Found(Verdict.BLAMED, str(merged.refused))
        kept = deepcopy(state_of(self.server))
        after = flat(kept)
        if client in merged.refused:
            same = _same(after, self._state_without(index, client))
            why = merged.refused[client]
            return (
                Found(Verdict.REJECTED, why)
                if same
                else Found(Verdict.POISONED, f"a trace of what was refused: {why}")
            )
        found = compare(_of_others(after, client), *self._baselines(index, client))
        if found.verdict == Verdict.POISONED:
            return found
        load_state(self.server, kept)
        return self._later(index, client) or found

    def _later(self, index: int, client: int) -> Found | None:
        """Plays honest turns and messages on top; returns what fails."""
        moments = self.recording.moments
        moment = moments[index]
        state = deepcopy(state_of(self.server))
        try:
            if self.turns:
                self._turn(moment, next((c for c in moment.blobs if c != client), client))
        except Exception as error:
            return Found(Verdict.UNUSABLE, f"honest turn: {type(error).__name__}: {first_line(error)}")
        load_state(self.server, state)
        for later in moments[index + 1 : index + 3]:
            self.server.context = later.context
            try:
                updates, refused = self._open(later, later.blobs)
                if not refused:
                    refused = self._merge(later, updates).refused
            except Exception as error:
                return Found(
                    Verdict.UNUSABLE,
                    f"next {later.exchange.name}: {type(error).__name__}: {first_line(error)}",
                )
            if refused:
                return Found(
                    Verdict.UNUSABLE, f"next {later.exchange.name}: honest message refused: {refused}"
                )
        return None

    def _turn(self, moment: Moment, number: int) -> None:
        """Plays the next turn of an honest client, on what the server sends it now."""
        federation = self.federation
        context = federation.exchanges.after(moment.context)
        if context.round > federation.rounds:
            return
        self.server.context = context
        exchange, data = federation.exchanges.at(context), federation.data.at(context.round)
        blob = federation.sender.pack(exchange, [number], context)[number]
        own = replace(context, client=number, stage=data.stages[number])
        for scores in (True, False) if context.round > 1 else (False,):
            federation.runner.activate(exchange, own, deepcopy(moment.personal[number]), blob)
            if scores and exchange.trains:
                self._score(ordered_loader(data, number))
            else:
                federation.runner.play(exchange, data)

    def _score(self, loader) -> None:
        """Lets the live client score a batch of its images with what it has received."""
        self.client.deploy()
        self.client.refresh(loader)
        scores = self.client.predict_step(next(iter(loader))).image_score
        if not scores.isfinite().all():
            raise UserError("scores are not finite")

    def _restore(self, moment: Moment) -> None:
        load_state(self.server, deepcopy(moment.before))
        self.server.context = moment.context

    def _open(self, moment: Moment, blobs: Mapping[int, bytes]) -> tuple[dict[int, Update], dict[int, str]]:
        updates, refused = {}, {}
        for client, blob in blobs.items():
            try:
                updates[client] = self.receiver.open(moment.exchange, client, blob, moment.sizes[client])
            except UserError as error:
                refused[client] = str(error)
        return updates, refused

    def _merge(self, moment: Moment, updates: Mapping[int, Update]):
        federation = self.federation
        return self.receiver.merge(
            moment.exchange, updates, moment.clients, federation.exchanges, moment.context
        )

    def _merged(self, index: int, clients: list[int]) -> State:
        """The state after honest messages of some clients; that before where there are none."""
        moment = self.recording.moments[index]
        self._restore(moment)
        if clients:
            updates, refused = self._open(moment, {client: moment.blobs[client] for client in clients})
            assert not refused, refused
            merged = self._merge(moment, updates)
            assert not merged.refused, merged.refused
        return flat(deepcopy(state_of(self.server)))

    def _baselines(self, index: int, client: int) -> tuple[State, State]:
        return (
            _of_others(self._state_honest(index), client),
            _of_others(self._state_without(index, client), client),
        )

    def _state_honest(self, index: int) -> State:
        if index not in self._honest:
            self._honest[index] = self._merged(index, list(self.recording.moments[index].blobs))
        return self._honest[index]

    def _state_without(self, index: int, client: int) -> State:
        if (index, client) not in self._without:
            others = [c for c in self.recording.moments[index].blobs if c != client]
            self._without[index, client] = self._merged(index, others)
        return self._without[index, client]


def flat(state: Any) -> State:
    """All tensors and numbers of a nested state, by path."""
    return dict(_walk(state, ""))


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, bool | int | float):
        yield path, torch.tensor(value)
    elif isinstance(value, nn.Module):
        yield from _walk(value.state_dict(), path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _walk(part, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _walk(part, f"{path}/{number}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk(getattr(value, field.name), f"{path}/{field.name}")


def _of_others(state: State, client: int) -> State:
    """What is neither of a client alone, which may withdraw its densities, nor only reported to the user.

    All clients' densities together follow from those of each.
    """
    own = (f"/last/{client}/", "/auxiliary/densities.", "/latest/", "/first_spread")
    return {name: entry for name, entry in state.items() if not name.startswith(own)}


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and torch.equal(one[name].nan_to_num(), other[name].nan_to_num())
        for name in one
    )


def _most(name: str) -> float:
    """Returns how many times as large as honest an entry may become: what the check on receipt lets pass."""
    if name.endswith("running_var"):
        return 100**2  # a variance is the square of a size
    # Logits are of weights that may be 100 times the median client's, which may have larger ones than this one.
    return 200 if "logits" in name else 100


def compare(after: State, honest: State, without: State) -> Found:
    """Compares a state with that of the honest run and with that without the client."""
    lost = sorted(honest.keys() & without.keys() - after.keys())
    if lost:
        return Found(Verdict.POISONED, f"lost {lost[0]}")
    shifted = ""
    for name, entry in after.items():
        usual, least = honest.get(name, without.get(name)), without.get(name, honest.get(name))
        if usual is None or least is None:
            continue  # what is of the client alone
        if entry.shape == usual.shape and torch.equal(entry, usual):
            continue
        if entry.ndim and len(entry) < min(len(usual), len(least)):
            return Found(Verdict.POISONED, f"rows lost of {name}")
        if not entry.is_floating_point():
            continue
        if not_finite(entry) > max(not_finite(usual), not_finite(least)):
            return Found(Verdict.POISONED, f"{name} is not finite")
        largest = max(_largest(usual), _largest(least), FLOOR)
        if _largest(entry) > _most(name) * largest:
            return Found(
                Verdict.POISONED, f"{name} is {_largest(entry) / largest:.3g} times as large as honest"
            )
        moved, out = _distance(entry, usual), _distance(least, usual)
        if moved > 10 * max(out, 1e-3 * _norm(usual), 1e-6):
            shifted = shifted or f"{name} moved {moved:.3g}, without the client {out:.3g}"
    return Found(Verdict.SHIFTED, shifted) if shifted else Found(Verdict.UNSEEN)


def not_finite(entry: Tensor) -> int:
    return int((~entry.isfinite()).sum())


def _largest(entry: Tensor) -> float:
    return float(entry.nan_to_num(0, 0, 0).abs().max()) if entry.numel() else 0.0


def _norm(entry: Tensor) -> float:
    return float(entry.double().nan_to_num().square().mean().sqrt()) if entry.numel() else 0.0


def _distance(one: Tensor, other: Tensor) -> float:
    """Root mean square difference; where numbers of rows differ, that of the sizes."""
    if one.shape != other.shape:
        return abs(_norm(one) - _norm(other))
    return _norm(one.double() - other.double())
