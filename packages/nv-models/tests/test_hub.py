"""The hub's cache without a network: what is there is found, and what is not is one sentence."""

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from nv_models import hub, load_model, resolve

SHA, OTHER = "a" * 40, "ab" * 20


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The hub's cache, with one repository; every request fails."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def unreachable(*args, **kwargs):
        raise httpx.ConnectError("[Errno 111] Connection refused")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    folder = tmp_path / "models--org--name"
    for commit in (SHA, OTHER):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    for name, commit in (("main", SHA), ("pr/1", OTHER), ("v1.0", OTHER), ("gone", "c" * 40)):
        (folder / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / name).write_text(commit)
    return folder / "snapshots"


@pytest.mark.parametrize(
    ("revision", "commit"),
    [
        (None, SHA),
        ("main", SHA),
        ("pr/1", OTHER),
        ("v1.0", OTHER),
        (SHA, SHA),
        (SHA[:7], SHA),
        (OTHER[:4], OTHER),
    ],
)
def test_b09_what_the_cache_has_is_found(cache, revision, commit):
    assert resolve("org/name", revision) == cache / commit


@pytest.mark.parametrize("revision", ["gone", "c" * 40, "dev", "ffff", "../refs"])
def test_b09_what_the_cache_lacks_is_one_sentence(cache, revision):
    with pytest.raises(FileNotFoundError, match="the hub is out of reach; go online") as error:
        resolve("org/name", revision)
    text = str(error.value)
    assert repr(revision) in text
    assert str(cache.parents[1]) in text
    assert "\n" not in text


def test_b09_the_beginning_of_two_commits(cache):
    (cache / ("abab" + "c" * 36)).mkdir()
    with pytest.raises(ValueError, match=r"may be abab\w+ or abab\w+: give more of the commit"):
        resolve("org/name", "abab")


def test_b09_an_empty_snapshot_is_none(cache):
    (cache / SHA / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="not in the hub's cache"):
        resolve("org/name", SHA)


def test_b09_the_hub_itself_looks_in_a_cache_without_lists_of_files(monkeypatch, cache):
    monkeypatch.setattr(hub, "snapshot_download", huggingface_hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/name", SHA) == cache / SHA
    with pytest.raises(FileNotFoundError, match=r"hf download org/name --revision cccccccc"):
        resolve("org/name", "c" * 40)


@pytest.mark.parametrize(
    "error", [httpx.ProxyError, httpx.ConnectTimeout, httpx.ReadError, OfflineModeIsEnabled]
)
def test_b09_every_kind_of_no_network(monkeypatch, cache, error):
    def fail(*args, **kwargs):
        raise error("no")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    assert resolve("org/name", SHA) == cache / SHA
    with pytest.raises(FileNotFoundError, match="the hub is out of reach"):
        resolve("org/other")


def test_b09_a_snapshot_without_a_shard_names_it(cache, tiny_checkpoint):
    folder = tiny_checkpoint()
    (folder / "model.safetensors").unlink()
    index = '{"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    (cache / ("d" * 40)).symlink_to(folder)
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002.safetensors is missing"):
        load_model(resolve("org/name", "d" * 40))


@pytest.mark.parametrize("error", [NotADirectoryError, PermissionError])
def test_16_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch, cache, error):
    def fail(*args, **kwargs):
        raise error(20, "Not a directory", "/a/file/token")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"org/name cannot be kept in .*; set HF_HOME") as raised:
        resolve("org/name")
    assert "/a/file/token" in str(raised.value)
    assert "\n" not in str(raised.value)


PROXIES = ["socks5://127.0.0.1:9", "nothing://127.0.0.1:9", "http://127.0.0.1:port"]


@pytest.mark.parametrize("proxy", PROXIES)
def test_16_a_proxy_that_cannot_be_used_is_one_sentence(monkeypatch, cache, proxy):
    def fail(*args, **kwargs):
        httpx.Client(proxy=proxy)

    monkeypatch.setattr(hub, "snapshot_download", fail)
    assert resolve("org/name", SHA) == cache / SHA
    with pytest.raises(ValueError, match=r"org/other cannot be asked .*; if HTTPS_PROXY") as raised:
        resolve("org/other")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_16_certificates_that_cannot_be_read_are_named(monkeypatch, cache, tmp_path, content):
    def fail(*args, **kwargs):
        httpx.Client()

    if content is not None:
        (tmp_path / "file.pem").write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "file.pem"))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setattr(hub, "snapshot_download", fail)
    assert resolve("org/name", SHA) == cache / SHA
    with pytest.raises(ValueError, match=r"org/other .* certificates .*; mend or unset SSL_CERT_"):
        resolve("org/other")


def test_16_a_token_that_no_header_takes_is_named_as_what_to_mend(monkeypatch, cache):
    def fail(*args, **kwargs):
        httpx.Client(headers={"authorization": "Bearer é"})

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"org/other cannot be asked .* or HF_TOKEN is set, mend"):
        resolve("org/other")


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\x00"])
@pytest.mark.parametrize("is_offline", [False, True])
def test_16_a_branch_of_the_cache_without_a_commit(monkeypatch, cache, content, is_offline):
    if is_offline:  # then huggingface_hub reads the file itself
        monkeypatch.setattr(hub, "snapshot_download", huggingface_hub.snapshot_download)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (cache.parent / "refs" / "main").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"refs/main holds b'.*': it must be a commit's id; delete"
    ):
        resolve("org/name")


def test_16_a_revision_that_is_too_long():
    with pytest.raises(ValueError, match=r"^revision is 'v{199}… \(300 characters\): .* most 255$"):
        resolve("org/name", revision="v" * 300)
