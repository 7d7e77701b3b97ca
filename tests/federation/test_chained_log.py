"""A log that several processes write to, and that stays one chain."""

from multiprocessing import get_context

from lit_fedad.federation.chained_log import ChainedLog


def _write(file):
    for number in range(20):
        ChainedLog(file).append(number=number)


def test_two_processes_write_one_chain(tmp_path):
    file = tmp_path / "approved.jsonl"
    processes = [get_context("fork").Process(target=_write, args=(file,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(ChainedLog(file).entries()) == 60
