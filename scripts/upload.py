"""Where an exported model goes: a bucket of S3 or what speaks like it, or a repository of the Hugging Face hub.

The one user of `boto3` and of `huggingface_hub`; both find the keys where they always do, and this program never sees one.
"""

from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from ..peer.errors import LocalError, UsageError

PACKAGES = {"s3": ("boto3", "pip install 'flockstep[s3]'"), "hf": ("huggingface_hub", "pip install 'flockstep[hf]'")}
"""By the scheme of the target: what it needs, and how to get it."""


def check_target(to: str) -> None:
    """Raise `UsageError` for a target that there is not, `LocalError` for one whose package is missing; "" is fine."""
    if not to:
        return
    parts = urlsplit(to)
    if parts.scheme not in PACKAGES or not parts.netloc or (parts.scheme == "hf" and not parts.path.strip("/")):
        raise UsageError(f"cannot upload to {to!r}", remedy="write s3://bucket/prefix or hf://user/repository")
    package, remedy = PACKAGES[parts.scheme]
    if find_spec(package) is None:
        raise LocalError(f"{parts.scheme}:// needs the package {package}", remedy=remedy)


def upload(folder: Path, to: str) -> None:
    """Put all files of a folder there. Raises `LocalError`."""
    check_target(to)
    parts = urlsplit(to)
    place = parts.path.strip("/")
    try:
        if parts.scheme == "s3":
            _to_s3(folder, parts.netloc, place)
        else:
            _to_hub(folder, f"{parts.netloc}/{place}")
    except Exception as error:  # Either package has dozens of its own, which all say why it did not work.
        raise LocalError(f"cannot upload to {to}: {error}", remedy="check its name and your credentials") from error


def _to_s3(folder: Path, bucket: str, prefix: str) -> None:
    import boto3

    client = boto3.client("s3")
    for path in sorted(folder.iterdir()):
        client.upload_file(str(path), bucket, f"{prefix}/{path.name}".lstrip("/"))


def _to_hub(folder: Path, repository: str) -> None:
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, exist_ok=True)
    hub.upload_folder(repo_id=repository, folder_path=str(folder))
