"""The channel: checks, codings, byte counts."""

import pytest
import torch
from helpers.refusals import refusal
from safetensors.torch import save

from lit_fedad.contracts import Context, Free, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import LARGEST_BLOB, Byte, Channel, Half, Link, Plain, elements
from lit_fedad.federation.message_check import check

CONTEXT = Context(seed=0, round=1, client=2)
SPEC = {"memory": TensorSpec((4, 3)), "counts": TensorSpec((Free("counts"),))}


def message() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"memory": torch.randn(4, 3, generator=draw), "counts": torch.arange(4.0)}


def test_plain_returns_the_same_numbers():
    link = Channel().up
    blob = link.pack(message(), SPEC, CONTEXT, "client 2")
    assert len(blob) == len(save(message()))
    arrived = link.unpack(blob, SPEC, "client 2")
    assert all(torch.equal(arrived[name], tensor) for name, tensor in message().items())


@pytest.mark.parametrize("codec", [Plain(), Byte()])
def test_entries_arrive_in_the_order_of_their_form(codec):
    """Who joins a message's entries to one vector compares like with like."""
    link, names = Link(codec), [f"w{number}" for number in (3, 1, 4, 0, 5, 9, 2, 6)]
    sent = {name: torch.zeros(2, 2) for name in reversed(names)}
    spec = {name: TensorSpec((2, 2)) for name in names}
    assert [*link.unpack(link.pack(sent, spec, CONTEXT, "client 2"), spec, "client 2")] == names


def test_the_papers_memory_is_22_48_megabytes():
    memory = {"memory": torch.zeros(56 * 56, 1792)}
    blob = Channel().up.pack(memory, {"memory": TensorSpec((3136, 1792))}, CONTEXT, "client 0")
    assert elements(memory) == 5_619_712
    assert len(blob) - 4 * 5_619_712 < 128
    assert round(len(blob) / 1e6, 2) == 22.48


def test_nothing_costs_nothing():
    link = Channel().up
    assert link.pack({}, {}, CONTEXT, "client 2") == b""
    assert link.unpack(b"", {}, "client 2") == {}


def test_half_halves_the_bytes():
    big = {"memory": torch.randn(256, 448)}
    spec = {"memory": TensorSpec((256, 448))}
    coded, plain = (len(Link(codec).pack(big, spec, CONTEXT, "x")) for codec in (Half(), Plain()))
    assert coded == pytest.approx(plain / 2, rel=0.001)
    link = Channel(up=Half()).up
    arrived = link.unpack(link.pack(big, spec, CONTEXT, "x"), spec, "x")
    assert arrived["memory"].dtype == torch.float32
    assert torch.allclose(arrived["memory"], big["memory"], rtol=2**-11, atol=1e-7)


def test_half_refuses_what_it_cannot_hold():
    with pytest.raises(UserError, match="'memory'.*65504"):
        Half().encode({"memory": torch.tensor([[1e6]])}, CONTEXT)


def test_half_sends_vectors_and_scalars_as_they_are():
    """Counts exceed what half precision holds, and small variances vanish in it."""
    few = {"count": torch.tensor(1e6), "variance": torch.tensor([1e-9, 2.0])}
    arrived = Half().decode(Half().encode(few, CONTEXT))
    assert all(torch.equal(arrived[name], tensor) for name, tensor in few.items())


@pytest.mark.parametrize("codec", [Half(), Byte()])
def test_whole_numbers_are_exact_in_any_coding(codec):
    counts = {"counts": torch.tensor([[(1 << 24) + 1, 3], [5, 7]])}
    spec = {"counts": TensorSpec((2, 2), torch.int64)}
    link = Link(codec)
    arrived = link.unpack(link.pack(counts, spec, CONTEXT, "client 2"), spec, "client 2")
    assert torch.equal(arrived["counts"], counts["counts"])


def test_byte_is_off_by_half_a_level_at_most():
    bank = torch.randn(500, 7) * torch.logspace(-3, 3, 7)
    sent = {"memory": bank, "counts": torch.arange(500.0)}
    codec = Byte()
    arrived = codec.decode(codec.encode(sent, CONTEXT))
    step = (bank.amax(0) - bank.amin(0)) / 255
    assert ((arrived["memory"] - bank).abs() <= step / 2 * 1.001).all()
    assert torch.equal(arrived["counts"], sent["counts"])
    assert set(arrived) == set(sent)


def test_byte_sends_an_empty_matrix_as_it_is():
    empty = {"vectors": torch.zeros(0, 3)}
    assert Byte().decode(Byte().encode(empty, CONTEXT))["vectors"].shape == (0, 3)


def test_byte_sends_vectors_whose_names_end_like_the_parts_of_a_matrix():
    sent = {"head.low": torch.ones(3), "gate.step": torch.zeros(2), "memory": torch.zeros(2, 2)}
    assert set(Byte().decode(Byte().encode(sent, CONTEXT))) == set(sent)


def test_byte_keeps_constant_channels():
    bank = torch.full((5, 2), 3.25)
    codec = Byte()
    assert torch.equal(codec.decode(codec.encode({"memory": bank}, CONTEXT))["memory"], bank)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"memory": torch.zeros(4, 2)}, r"client 2 sent 'memory' of shape \(4, 2\), declared as \(4, 3\)"),
        ({"memory": torch.zeros(4, 3, dtype=torch.float64)}, "'memory' as torch.float64"),
        ({"counts": torch.tensor([1.0, torch.inf])}, "'counts' with values that are not finite"),
        ({"counts": torch.tensor([1.0, torch.nan])}, "'counts' with values that are not finite"),
        ({"image": torch.zeros(1)}, r"client 2 sent \['image'\] undeclared"),
        ({"w" * 10_000: torch.zeros(1)}, r"client 2 sent \['w{198} undeclared"),
    ],
)
def test_what_was_not_declared_does_not_cross(change, error):
    """Whatever the sender checked: another machine's bytes are checked again."""
    link, given = Channel().up, {**message(), **change}
    with pytest.raises(UserError, match=error):
        link.pack(given, SPEC, CONTEXT, "client 2")
    with pytest.raises(UserError, match=error):
        link.unpack(save(given), SPEC, "client 2")


@pytest.mark.parametrize("codec", [Plain(), Half(), Byte()])
@pytest.mark.parametrize("blob", [b"", b"\0" * 7, b"no message", save({"memory.levels": torch.zeros(2)})])
def test_bytes_that_hold_no_message_are_refused_in_one_line(codec, blob):
    with refusal("client 2"):
        Link(codec).unpack(blob, SPEC, "client 2")


def test_what_was_declared_must_come():
    with pytest.raises(UserError, match=r"left out \['counts'\]"):
        Channel().up.pack({"memory": torch.zeros(4, 3)}, SPEC, CONTEXT, "client 2")


def test_eight_bits_are_never_stretched_to_more_than_was_sent():
    """Torch would broadcast these 0.5 MB to 40 GB."""
    forged = save(
        {
            "memory.levels": torch.zeros(100_000, 1, dtype=torch.uint8),
            "memory.low": torch.zeros(100_000),
            "memory.step": torch.zeros(1),
            "counts": torch.zeros(4),
        }
    )
    with pytest.raises(UserError, match=r"hold no message \(ValueError\)"):
        Link(Byte()).unpack(forged, SPEC, "client 2")


@pytest.mark.parametrize("codec", [Half(), Byte()])
@pytest.mark.parametrize("why", ["definite", "exact"])
def test_positive_definite_and_exact_matrices_are_sent_as_they_are(codec, why):
    """Rounded, those of a cluster that is nearly flat are no longer positive definite."""
    axes = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0))).Q
    flat = torch.stack([axes @ torch.diag(torch.logspace(0, low, 6)) @ axes.mT for low in (-6, -4, -5)])
    sent = {"covariance": (flat + flat.mT) / 2, "memory": torch.randn(4, 3)}
    spec = {"covariance": TensorSpec((3, 6, 6), **{why: True}), "memory": TensorSpec((4, 3))}
    link = Link(codec)
    arrived = link.unpack(link.pack(sent, spec, CONTEXT, "client 2"), spec, "client 2")
    assert torch.equal(arrived["covariance"], sent["covariance"])
    assert not torch.equal(arrived["memory"], sent["memory"])
    assert link.largest(spec) > link.largest({**spec, "covariance": TensorSpec((3, 6, 6))})


FREE = {
    "bank": TensorSpec((Free("vectors", 40), 8), unordered=True),
    'a name with "quotes" and ü': TensorSpec((Free("vectors"), 3, 2)),
    "counts": TensorSpec((Free("vectors"),), torch.int64, low=0),
    "covariance": TensorSpec((4, 4), definite=True),
    "steps": TensorSpec((), torch.int64, low=0),
}


@pytest.mark.parametrize("codec", [Plain(), Half(), Byte()])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_no_message_is_longer_than_its_form_says(codec, rows):
    link, names = Link(codec), list(FREE)
    message = {
        names[0]: torch.randn(rows, 8),
        names[1]: torch.randn(rows, 3, 2),
        "counts": torch.ones(rows, dtype=torch.int64),
        "covariance": torch.eye(4),
        "steps": torch.tensor(3),
    }
    blob = link.pack(message, FREE, Context(0, 1), "client 0")
    assert 0 < len(blob) <= link.largest(FREE) < 6000
    assert set(link.unpack(blob, FREE, "client 0")) == set(FREE)


@pytest.mark.parametrize("codec", [Plain(), Half(), Byte()])
@pytest.mark.parametrize("shape", [(2, 4000), (4000,)])
def test_a_wide_matrix_and_a_long_vector_are_no_longer_than_their_form_says(codec, shape):
    link, spec = Link(codec), {"mean": TensorSpec(shape)}
    blob = link.pack({"mean": torch.zeros(shape)}, spec, CONTEXT, "client 2")
    assert link.unpack(blob, spec, "client 2")["mean"].shape == shape


def test_equal_bytes_are_checked_once_and_others_anew(monkeypatch):
    """A process receives the server's message once for each of its clients."""
    link, checked = Link(Plain()), []

    def counted(found, spec, sender):
        checked.append(sender)
        check(found, spec, sender)

    monkeypatch.setattr("lit_fedad.federation.channel.check", counted)
    blob, other = save(message()), save({**message(), "counts": torch.arange(5.0)})
    first, again = (link.unpack(blob, SPEC, sender) for sender in ("client 0", "client 1"))
    assert first["memory"].data_ptr() != again["memory"].data_ptr()
    link.unpack(other, SPEC, "client 2")
    with pytest.raises(UserError, match=r"'counts' with values from 0 to 4"):
        link.unpack(other, {**SPEC, "counts": TensorSpec((Free("counts"),), high=3)}, "client 3")
    with pytest.raises(UserError, match="not finite"):
        link.unpack(save({**message(), "counts": torch.tensor([torch.nan])}), SPEC, "client 4")
    assert checked == ["client 0", "client 2", "client 3", "client 4"]


def test_more_bytes_than_the_form_holds_are_not_read(monkeypatch):
    link = Link(Plain())
    most = link.largest(FREE)
    monkeypatch.setattr("lit_fedad.federation.channel.load", None)
    with pytest.raises(UserError, match=f"^client 3 sent {most + 1} bytes; .* has at most {most}$"):
        link.unpack(bytes(most + 1), FREE, "client 3")


def test_a_form_that_leaves_a_size_open_has_a_bound_too():
    assert Link(Plain()).largest({"images": TensorSpec((Free("images"), 3))}) == LARGEST_BLOB
    assert Link(Plain()).largest({}) == 0
