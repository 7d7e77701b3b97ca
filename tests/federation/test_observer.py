"""What an observer hears of a round, and that listening changes nothing."""

from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import refusal

from lit_fedad.audits.statistics import adversary_view
from lit_fedad.contracts import Context, Evidence


def test_updates_come_before_the_server_takes_them_in(toy):
    heard = []

    def listen(federation, context: Context, updates):
        weights = {c: (float(update.message["w"]), update.num_samples) for c, update in updates.items()}
        heard.append((context.round, float(federation.server.w), weights))

    history = toy(callbacks=[SimpleNamespace(on_updates=listen)]).run()
    merged = [report.scalars["weight"] for report in history]
    assert [before for _, before, _ in heard] == pytest.approx([0.0, *merged[:-1]])
    assert [round for round, _, _ in heard] == [1, 2, 3]
    for after, (_, _, updates) in zip(merged, heard, strict=True):
        assert after == pytest.approx(sum(w * n for w, n in updates.values()) / 4)


def test_observer_has_broadcast_and_upload_but_no_personal_state(toy, tmp_path):
    plain = toy(folder=tmp_path / "plain").run()
    seen = []

    def observe(server, client, update):
        seen.append((client.context.client, client.visits, float(client.task.w.detach())))
        client.task.w.data.copy_(update.message["w"])

    def listen(federation, context, updates):
        before = float(federation.server.w)
        for number, update in updates.items():
            client = adversary_view(federation, number, update)
            assert float(client.task.w.detach()) == float(update.message["w"])
            assert seen[-1] == (number, 0, before)

    listener = SimpleNamespace(on_updates=listen)
    history = toy(folder=tmp_path / "heard", evidence=Evidence(predict=observe), callbacks=[listener]).run()
    assert len(seen) == 6
    assert [r.scalars for r in history] == [r.scalars for r in plain]
    assert history[-1].metrics == plain[-1].metrics


def test_method_that_says_nothing_of_images_is_refused(toy):
    def attack(federation, context, updates):
        adversary_view(federation, 0, updates[0])

    federation = toy(callbacks=[SimpleNamespace(on_updates=attack)])
    with refusal("ToyClient: its method does not say what its messages show"):
        federation.run()
    assert torch.equal(federation.server.w, torch.zeros(1))
