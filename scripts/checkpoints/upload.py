"""Where a model may be put: a repository of the Hugging Face hub, or a prefix in a bucket of S3 or of a compatible service.

A repository gets one commit, whole or not at all, whose large files the hub holds before it. An upload that was cut goes on:
neither target is sent a file again that it has.

The one user of `boto3`, and of `huggingface_hub` but for reading. Both find the credentials by themselves, in the
environment or where their own login has put them; this program never reads them.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ...peer.base.errors import LocalError, UsageError
from ...peer.base.install import how_to_install

PACKAGES = {"s3": ("boto3", how_to_install("s3")), "hf": ("huggingface_hub", how_to_install("hf"))}
"""By the scheme of the target: the required package, and how to install it."""
DATASETS = "datasets/"
"""What the names of datasets of the hub begin with."""
CONNECT_SECONDS = 20.0
MAX_REASON = 300
"""Letters of what a service answers: some send a page."""


class Target(Protocol):
    """Where a model may be put. Raises `LocalError` where it cannot be, with the reason in one line."""

    def check(self) -> None:
        """Find out whether it is there and may be written, before anything large is made."""

    def put(self, folder: Path) -> str:
        """Put the files of a folder there. Return their name at this commit, `hf://…`; empty where there are no commits."""


def check_target(to: str) -> None:
    """Raise `UsageError` for an invalid target, `LocalError` for a missing package; "" is no target."""
    if not to:
        return
    parts = urlsplit(to)
    name = f"{parts.netloc}{parts.path}".rstrip("/")
    least = 1 + name.startswith(DATASETS) if parts.scheme == "hf" else 0
    if parts.scheme not in PACKAGES or not parts.netloc or name.count("/") < least:
        raise UsageError(f"cannot upload to {to!r}", remedy="write s3://bucket/prefix or hf://user/repository")
    package, remedy = PACKAGES[parts.scheme]
    if find_spec(package) is None:
        raise LocalError(f"{parts.scheme}:// needs the package {package}", remedy=remedy)


def open_target(to: str) -> Target:
    """Return a target by its name, without asking it. Raises as `check_target`."""
    check_target(to)
    parts = urlsplit(to)
    path = parts.path.strip("/")
    return _Bucket(to, parts.netloc, path) if parts.scheme == "s3" else _Repository(to, f"{parts.netloc}/{path}")


@contextlib.contextmanager
def _in_one_line(to: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Either package has dozens of its own, all with a reason.
        reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
        raise LocalError(f"cannot upload to {to}: {reason}", remedy="check its name and your credentials") from error


class _Repository:
    """A repository of the hub that `HF_ENDPOINT` names: `user/name` of a model, or `datasets/user/name[/folder]`."""

    def __init__(self, to: str, name: str) -> None:
        from huggingface_hub import HfApi

        self._to, self._kind = to, "dataset" if name.startswith(DATASETS) else "model"
        owner, repository, *inside = name.removeprefix(DATASETS).split("/", 2 if self._kind == "dataset" else 1)
        self._name, self._inside = f"{owner}/{repository}", "".join(inside)
        self._hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)

    def check(self) -> None:
        with _in_one_line(self._to):
            # It says nothing of whether one that exists may be written.
            self._hub.create_repo(self._name, repo_type=self._kind, exist_ok=True)
            self._hub.auth_check(self._name, repo_type=self._kind, write=True)

    def put(self, folder: Path) -> str:
        self.check()
        with _in_one_line(self._to):
            done = self._hub.upload_folder(
                repo_id=self._name,
                repo_type=self._kind,
                folder_path=str(folder),
                path_in_repo=self._inside or None,
            )
        kind, inside = DATASETS if self._kind == "dataset" else "", f"/{self._inside}" if self._inside else ""
        return f"hf://{kind}{self._name}@{done.oid}{inside}"


class _Bucket:
    """A prefix of a bucket of S3, or of the service that `AWS_ENDPOINT_URL` names."""

    def __init__(self, to: str, bucket: str, prefix: str) -> None:
        import boto3
        from botocore.config import Config

        self._to, self._bucket, self._prefix = to, bucket, prefix
        retries = {"mode": "standard", "total_max_attempts": 3}
        with _in_one_line(to):
            self._client: Any = boto3.client("s3", config=Config(retries=retries, connect_timeout=CONNECT_SECONDS))

    def check(self) -> None:
        with _in_one_line(self._to):
            self._client.head_bucket(Bucket=self._bucket)

    def put(self, folder: Path) -> str:
        for path in sorted(folder.iterdir()):
            place, digest = "/".join(filter(None, (self._prefix, path.name))), _sha256(path)
            with _in_one_line(self._to):
                if self._digest_at(place) != digest:
                    self._client.upload_file(str(path), self._bucket, place, ExtraArgs={"Metadata": {"sha256": digest}})
        return ""

    def _digest_at(self, key: str) -> str:
        """Return the digest that an earlier upload has written beside an object; empty if there is none."""
        from botocore.exceptions import ClientError

        try:
            return str(self._client.head_object(Bucket=self._bucket, Key=key)["Metadata"].get("sha256", ""))
        except ClientError as error:
            # Who may write and not list is answered 403 for what is not there.
            if error.response["ResponseMetadata"]["HTTPStatusCode"] in (403, 404):
                return ""
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
