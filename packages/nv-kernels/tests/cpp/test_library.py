"""The compiled kernels are made once, however many ask for them at once."""

import threading

import pytest
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


@pytest.mark.parametrize("command", ["g++ '-O", "g++ -O\\"])
def test_16_a_command_that_cannot_be_split_is_a_reason_not_an_error(monkeypatch, command):
    monkeypatch.setenv("CXX", command)
    reason = library._load.__wrapped__()
    assert repr(command) in reason
    assert reason.endswith("correct or unset it")


def test_16_words_of_a_compiler_in_any_bytes_are_a_reason_not_an_error(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nprintf '\\377 no disk' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "failed: \ufffd no disk" in library._load.__wrapped__()
