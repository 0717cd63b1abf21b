"""The folder of compiled kernels and converted models, on all kinds of machines."""

import os
import subprocess
import sys

import pytest
from nv_kernels import cache_folder, cache_path


@pytest.fixture(autouse=True)
def _folders(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache_folder.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def private(tmp_path):
    return tmp_path / "tmp" / f"nv-{os.getuid()}"


def test_the_users_choice_comes_first(monkeypatch, tmp_path):
    assert cache_path("kernels", "a") == tmp_path / "home/.cache/nv/kernels/a"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path("kernels", "a") == tmp_path / "xdg/nv/kernels/a"
    assert (tmp_path / "xdg/nv/kernels").is_dir()
    assert not private(tmp_path).exists()


def test_b10_a_relative_xdg_cache_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    assert cache_path("kernels", "a") == tmp_path / "home/.cache/nv/kernels/a"


def test_b10_a_user_without_a_home_gets_a_private_folder(monkeypatch, tmp_path):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache_folder.Path, "home", home)
    assert cache_path("gguf", "a") == private(tmp_path) / "gguf" / "a"
    assert private(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["home", "home/.cache", "home/.cache/nv"])
def test_b10_a_file_where_the_folder_should_be(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).touch()
    assert cache_path("gguf", "a") == private(tmp_path) / "gguf" / "a"


def test_b10_a_folder_that_cannot_be_written_serves_what_it_has(monkeypatch, tmp_path):
    folder = tmp_path / "home/.cache/nv/kernels"
    folder.mkdir(parents=True)
    (folder / "there").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: folder not in (path, *path.parents))
    assert cache_path("kernels", "there") == folder / "there"
    assert cache_path("kernels", "new") == private(tmp_path) / "kernels" / "new"


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_b10_a_folder_that_others_can_write_is_not_trusted(tmp_path, mode):
    (tmp_path / "home").touch()
    private(tmp_path).mkdir()
    private(tmp_path).chmod(mode)
    with pytest.raises(OSError, match="set XDG_CACHE_HOME to a folder that can"):
        cache_path("gguf", "a")


def test_b10_a_link_among_the_temporary_files_is_not_trusted(tmp_path):
    (tmp_path / "home").touch()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="nv cannot write its cache"):
        cache_path("gguf", "a")


def test_b10_a_process_of_an_unknown_user(tmp_path):
    """As with `docker run --user 54321`: HOME is not set and the user database has no entry."""
    script = (
        "import os, pwd, pathlib\n"
        "from nv_kernels.cache_folder import cache_path\n"
        "print(cache_path('kernels', 'a'))"
    )
    isolated = ["unshare", "-U", "--map-user=54321", "--map-group=54321"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no user namespaces")
    kept = {n: v for n, v in os.environ.items() if n not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [*isolated, sys.executable, "-c", script],
        env={**kept, "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "tmp/nv-54321/kernels/a")
