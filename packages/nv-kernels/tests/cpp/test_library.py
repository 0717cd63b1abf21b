"""The compiled kernels are made once, however many ask for them at once."""

import threading

from nv_kernels.cpp import library


def test_b05_threads_that_come_at_once_compile_once(monkeypatch, tmp_path):
    all_are_here, compiled_by, path = threading.Barrier(4), [], tmp_path / "made.so"

    def compile_(_, made):
        compiled_by.append(threading.get_ident())
        made.touch()

    def work():
        is_missing = not path.exists()
        all_are_here.wait()
        if is_missing:
            library._make(["c++"], path)

    monkeypatch.setattr(library, "_compile", compile_)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled_by) == 1
