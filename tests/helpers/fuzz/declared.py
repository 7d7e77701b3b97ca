"""Messages that keep to their declared form, or nearly, and lie: what a client's own check can let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec, TensorSpec


@dataclass(frozen=True)
class Honest:
    """What a liar can start from.

    Attributes:
        message: Its own honest message.
        spec: The declared form.
        others: Honest messages of other clients in the exchange.
        last: The server's message.
    """

    message: Message
    spec: MessageSpec
    others: list[Message]
    last: Message


def lie(honest: Honest, draw: Random) -> tuple[Message, str]:
    """Draws a lie; returns the message and what was done to it."""
    message, done = dict(honest.message), []
    if not message:
        return message, "nothing"
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        free = any(isinstance(size, Free) for form in honest.spec.values() for size in form.shape)
        if free and draw.random() < 0.4:
            message, what = _resized(message, honest.spec, draw)
        else:
            message, what = _falsified(message, honest, draw)
        done.append(what)
    return message, ", ".join(done)


def _falsified(message: Message, honest: Honest, draw: Random) -> tuple[Message, str]:
    """Changes the values of one entry, or of all of a kind."""
    name = draw.choice(sorted(message))
    form = honest.spec[name]
    table: dict[str, Callable[..., Tensor]] = COUNTS if not form.dtype.is_floating_point else FLOATS
    if form.definite and draw.random() < 0.6:
        table = MATRICES
    what, function = draw.choice(sorted(table.items()))
    alike = [n for n in message if honest.spec[n].dtype.is_floating_point == form.dtype.is_floating_point]
    names = alike if table is FLOATS and draw.random() < 0.3 else [name]
    clipped = draw.random() < 0.8
    state = draw.getstate()
    for one in names:
        draw.setstate(state)  # the same lie in each of them
        entry = message[one].clone() if form.dtype.is_floating_point else message[one].long()
        changed = function(entry, honest.spec[one], draw, one, honest)
        if clipped and not honest.spec[one].definite:
            changed = changed.clamp(honest.spec[one].low, honest.spec[one].high)
        message = {**message, one: changed.to(honest.spec[one].dtype).reshape(message[one].shape)}
    return message, f"{what} {'all' if len(names) > 1 else name}"


def _resized(message: Message, spec: MessageSpec, draw: Random) -> tuple[Message, str]:
    """Changes a size that the sender chooses, in all entries that share it or in one only."""
    free = {size.name: size for form in spec.values() for size in form.shape if isinstance(size, Free)}
    wanted = draw.choice(sorted(free))
    places = [
        (n, d)
        for n, f in spec.items()
        for d, s in enumerate(f.shape)
        if isinstance(s, Free) and s.name == wanted
    ]
    size = message[places[0][0]].shape[places[0][1]]
    new = draw.choice((0, 1, size - 1, size + 1, 2 * size, size // 2, 3, 17, free[wanted].at_most or 40))
    new = max(0, min(new, 200))
    inconsistent = draw.random() < 0.15
    if inconsistent:
        places = [draw.choice(places)]
    message = dict(message)
    for name, dim in places:
        message[name] = _of_size(message[name], dim, new, spec[name], draw)
    counted = next((name for name in message if name.endswith("_per_class")), None)
    if counted and "images" in message and not inconsistent and draw.random() < 0.7:
        images = min(int(message[counted].sum()), 2000)
        message["images"] = _of_size(message["images"], 0, images, spec["images"], draw)
    return message, f"{wanted} {size}->{new}{' in one entry' if inconsistent else ''}"


def _of_size(tensor: Tensor, dim: int, size: int, form: TensorSpec, draw: Random) -> Tensor:
    if form.distinct and size <= form.high - form.low + 1:
        return torch.tensor(draw.sample(range(int(form.low), int(form.high) + 1), size), dtype=form.dtype)
    if not tensor.shape[dim]:
        shape = list(tensor.shape)
        shape[dim] = size
        return torch.zeros(shape, dtype=tensor.dtype)
    return tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])


def _power(draw: Random, low: int = -9, high: int = 9) -> float:
    return 10.0 ** draw.randint(low, high)


def _seeded(draw: Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.getrandbits(32))


def _one_entry(tensor: Tensor, draw: Random, value: float) -> Tensor:
    if tensor.numel():
        tensor.view(-1)[draw.randrange(tensor.numel())] = value
    return tensor


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _moved(tensor: Tensor, draw: Random) -> Tensor:
    if tensor.numel() > 1:
        flat, (one, other) = tensor.view(-1), draw.sample(range(tensor.numel()), 2)
        part = flat[one].clone() if draw.random() < 0.5 else 1
        flat[one] -= part
        flat[other] += part
    return tensor


def _bound(form: TensorSpec, draw: Random) -> float:
    return float(max(min(draw.choice((form.low, form.high)), 1e15), -1e15))


def _singular(tensor: Tensor, draw: Random) -> Tensor:
    """Matrices of rank one, and a little of the unit matrix."""
    width = tensor.shape[-1]
    v = torch.randn(*tensor.shape[:-1], 1, generator=_seeded(draw), dtype=torch.float64)
    size = max(_rms(tensor), 1e-6)
    return (size * v @ v.mT + size * _power(draw, -9, 0) * torch.eye(width, dtype=torch.float64)).float()


def _others(honest: Honest, name: str, tensor: Tensor, draw: Random) -> Tensor:
    fitting = [m[name] for m in honest.others if m[name].shape == tensor.shape]
    return draw.choice(fitting).clone() if fitting else tensor


def _last(honest: Honest, name: str, tensor: Tensor) -> Tensor:
    last = honest.last.get(name)
    return last.clone() if last is not None and last.shape == tensor.shape else tensor


def _rows(tensor: Tensor, draw: Random) -> Tensor:
    return tensor[torch.randperm(len(tensor), generator=_seeded(draw))] if tensor.ndim else tensor


def _noise(tensor: Tensor, draw: Random) -> Tensor:
    return torch.randn(tensor.shape, generator=_seeded(draw)) * _rms(tensor) * _power(draw, -3, 3)


# Each takes the entry, its form, the draw, its name and what is honest.
FLOATS: dict[str, Callable[..., Tensor]] = {
    "scaled": lambda t, f, d, n, h: t * _power(d),
    "scaled somewhat": lambda t, f, d, n, h: t * d.choice((0.01, 0.1, 3.0, 10.0, 30.0, 90.0)),
    "negated": lambda t, f, d, n, h: -t,
    "negated and scaled": lambda t, f, d, n, h: -t * d.choice((3.0, 10.0, 50.0, 90.0)),
    "zero": lambda t, f, d, n, h: torch.zeros_like(t),
    "constant": lambda t, f, d, n, h: torch.full_like(t, d.choice((-1, 1)) * _power(d)),
    "subnormal": lambda t, f, d, n, h: torch.full_like(t, 1e-42),
    "tiny": lambda t, f, d, n, h: t * 1e-30,
    "at a bound": lambda t, f, d, n, h: torch.full_like(t, _bound(f, d)),
    "one entry at a bound": lambda t, f, d, n, h: _one_entry(t, d, _bound(f, d)),
    "one large entry": lambda t, f, d, n, h: _one_entry(t, d, d.choice((-1, 1)) * _power(d, 0, 9)),
    "one entry 90 times the largest": lambda t, f, d, n, h: _one_entry(
        t, d, d.choice((-90, 90)) * float(t.abs().max() if t.numel() else 0)
    ),
    "one zero entry": lambda t, f, d, n, h: _one_entry(t, d, 0.0),
    "shifted": lambda t, f, d, n, h: t + d.choice((-1, 1)) * _power(d, -3, 6),
    "permuted": lambda t, f, d, n, h: t.flatten()[torch.randperm(t.numel(), generator=_seeded(d))],
    "rows permuted": lambda t, f, d, n, h: _rows(t, d),
    "reversed": lambda t, f, d, n, h: t.flip(0) if t.ndim else t,
    "all rows the first": lambda t, f, d, n, h: t[:1].expand_as(t).clone() if t.ndim else t,
    "noise": lambda t, f, d, n, h: _noise(t, d),
    "another client's": lambda t, f, d, n, h: _others(h, n, t, d),
    "the server's": lambda t, f, d, n, h: _last(h, n, t),
}
MATRICES: dict[str, Callable[..., Tensor]] = {
    "scaled": lambda t, f, d, n, h: t * _power(d),
    "nearly singular": lambda t, f, d, n, h: _singular(t, d),
    "unit times": lambda t, f, d, n, h: torch.eye(t.shape[-1]).expand_as(t) * _power(d, -40, 9),
    "other densities'": lambda t, f, d, n, h: _others(h, n, t, d),
    "negated": lambda t, f, d, n, h: -t,
}
COUNTS: dict[str, Callable[..., Tensor]] = {
    "scaled": lambda t, f, d, n, h: (t.double() * _power(d, 0, 9)).clamp(-(2**62), 2**62).long(),
    "zero": lambda t, f, d, n, h: torch.zeros_like(t),
    "one": lambda t, f, d, n, h: torch.ones_like(t),
    "at a bound": lambda t, f, d, n, h: torch.full_like(t, int(_bound(f, d))),
    "one entry at a bound": lambda t, f, d, n, h: _one_entry(t, d, int(_bound(f, d))),
    "one more or less": lambda t, f, d, n, h: _one_entry(t, d, d.choice((-1, 1, 2, 7, 255))),
    "moved": lambda t, f, d, n, h: _moved(t, d),
    "permuted": lambda t, f, d, n, h: t.flatten()[torch.randperm(t.numel(), generator=_seeded(d))],
    "reversed": lambda t, f, d, n, h: t.flip(0) if t.ndim else t,
    "drawn": lambda t, f, d, n, h: torch.randint(
        int(max(f.low, -1000)), int(min(f.high, 1000)) + 1, t.shape, generator=_seeded(d)
    ),
    "another client's": lambda t, f, d, n, h: _others(h, n, t, d),
    "twice the same": lambda t, f, d, n, h: t[:1].expand_as(t).clone() if t.ndim and len(t) else t,
}
