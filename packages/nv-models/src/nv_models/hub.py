"""A repository of the hub: fetched, or found in the hub's cache.

Owns the call of huggingface_hub, the search in its cache where the hub is out of reach, and errors
of one sentence. Never reads a file of a model.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

COMMIT = re.compile(r"[0-9a-f]{4,40}")
MOST_CHARACTERS = 255
"""Of a revision: what a file's name may have."""
COPIES = ["original/*", "metal/*"]
"""Folders in which Llama's and GPT-OSS's repositories keep the weights in another form."""


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder of a repository's files, through the hub's own cache and offline switch.

    Where the hub cannot be reached or refuses, a snapshot that the cache has is taken.

    Raises:
        FileNotFoundError: neither in the cache nor within reach, or in the cache in part.
        ValueError: a repository or revision that is unknown, gated or refused, a proxy, a token or
            certificates that cannot be used, a cache that cannot be written or read, or a revision
            that is too long.
    """
    if revision is not None and len(revision) > MOST_CHARACTERS:
        raise ValueError(
            f"revision is {revision!r:.200}… ({len(revision)} characters): it must be a branch, a "
            f"tag or a commit, of at most {MOST_CHARACTERS}"
        )
    try:
        found = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=[*patterns], ignore_patterns=COPIES
            )
        )
    except RevisionNotFoundError as error:
        raise ValueError(f"{name} has no revision {revision!r}") from error
    except (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        httpx.TransportError,
    ) as error:
        if (path := getattr(error, "snapshot_path", None)) is not None:  # the hub knows its files
            raise FileNotFoundError(f"{path} is not whole: {one_line(error)}") from error
        if cached := cached_snapshot(name, revision, patterns):
            return cached
        raise _worded(name, revision, error) from error
    except (
        ImportError,
        ValueError,
        httpx.InvalidURL,
    ) as error:  # of a proxy or a token that httpx cannot use
        if cached := cached_snapshot(name, revision, patterns):
            return cached
        raise ValueError(
            f"{name} cannot be asked of the hub: {one_line(error)}; if HTTPS_PROXY, HTTP_PROXY, "
            "ALL_PROXY or HF_TOKEN is set, mend it"
        ) from error
    except OSError as error:
        if (fault := _fault_of_certificates()) is not None:
            if cached := cached_snapshot(name, revision, patterns):
                return cached
            raise ValueError(
                f"{name} cannot be asked of the hub: the certificates cannot be read ({fault}); "
                "mend or unset SSL_CERT_FILE and SSL_CERT_DIR"
            ) from error
        raise ValueError(
            f"{name} cannot be kept in the hub's cache, {constants.HF_HUB_CACHE}: "
            f"{one_line(error)}; set HF_HOME to a folder that this user may write"
        ) from error
    if found.name == "snapshots":  # a file of the cache is empty, and huggingface_hub goes on
        commit_in(found.parent / "refs" / (revision or constants.DEFAULT_REVISION))
    return found


def cached_snapshot(name: str, revision: str | None, patterns: Sequence[str]) -> Path | None:
    """The cache's folder of a branch, a tag, or a commit's id or the beginning of one.

    A folder that has none of the files does not count.

    Raises:
        ValueError: several commits begin so, or the cache's file of a branch holds none.
    """
    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    snapshots, wanted = repository / "snapshots", revision or constants.DEFAULT_REVISION
    reference = repository / "refs" / wanted
    if reference.is_file():
        commits = [commit_in(reference)]
    elif COMMIT.fullmatch(wanted):
        commits = sorted(folder.name for folder in snapshots.glob(f"{wanted}*"))
    else:
        return None
    if len(commits) > 1:
        raise ValueError(
            f"revision {wanted!r} of {name} may be {' or '.join(commits)}: give more of the commit"
        )
    folder = snapshots / commits[0] if commits else snapshots
    has_files = any(file.exists() for pattern in patterns for file in folder.glob(pattern))
    return folder if has_files else None


def commit_in(reference: Path) -> str:
    """The commit's id that a file of the cache holds.

    Raises:
        ValueError: it holds none.
    """
    content = reference.read_bytes().strip()
    if not content or not content.isascii():
        raise ValueError(
            f"{reference} holds {content!r:.100}: it must be a commit's id; delete the file, and "
            "download the model again"
        )
    return content.decode()


def _fault_of_certificates() -> str | None:
    """Why no connection can be secure; None if one can. The error of ssl does not name the file."""
    try:
        httpx.create_ssl_context()
    except OSError as error:
        return one_line(error)
    return None


def _worded(name: str, revision: str | None, error: Exception) -> ValueError | FileNotFoundError:
    """The error to raise where neither hub nor cache has the files."""
    if isinstance(error, GatedRepoError):
        return ValueError(f"{name} is gated: accept its terms, then `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        return ValueError(
            f"{name} is neither a folder here nor a repository of the hub that you may read; check "
            "the spelling, or `hf auth login`"
        )
    if isinstance(error, HfHubHTTPError):
        return ValueError(f"the hub refused {name}: {one_line(error)}")
    asked = f" at revision {revision!r}" if revision else ""
    option = f" --revision {revision}" if revision else ""
    return FileNotFoundError(
        f"{name}{asked} is not a folder here, not in the hub's cache ({constants.HF_HUB_CACHE}), "
        "and the hub is out of reach; go online (unset HF_HUB_OFFLINE) or run "
        f"`hf download {name}{option}` where there is a network"
    )


def one_line(error: Exception) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
