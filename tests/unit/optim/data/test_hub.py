"""A dataset of the hub: its files are read by range at one commit, and nothing that its author wrote is interpreted."""

import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from flockstep.dht.run.manifest import Data
from flockstep.optim.data import rows, streams
from flockstep.optim.data.hub import Hub, chosen, pinned_source, steadily
from flockstep.optim.data.rows import Skip, Skips
from flockstep.optim.data.sources import open_data
from flockstep.optim.data.streams import TokenStream
from flockstep.optim.data.tokenizer import ByteTokenizer
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError, UsageError
from support.hub import COMMIT, REPOSITORY, StandIn, stand_in

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("httpx")

NAME = f"hf:{REPOSITORY}@{COMMIT}"
TEXTS = [f"{index:05d} once upon a time " * 4 for index in range(200)]
RESOLVED = f"/datasets/{REPOSITORY}/resolve/{COMMIT}/"
HOSTILE = {
    "README.md": b'---\nconfigs:\n- config_name: default\n  data_files: "reference://*.parquet::http://127.0.0.1:9/refs.json"\n---\n',
    "dataset_infos.json": b'{"default": {"features": {"text": {"_type": "Image"}}}}',
    "ds.py": b"import os; os.system('touch /tmp/owned')",
    "../../etc/train.parquet": b"",
    "a::b/train.parquet": b"",
    "{{x}}/train.parquet": b"",
    "train-*.parquet": b"",
    "/train.parquet": b"",
    "http://127.0.0.1/train.parquet": b"",
}


def table(texts: list[Any], **metadata: str) -> bytes:
    out = io.BytesIO()
    made = pyarrow.table({"text": texts, "image": ["/etc/passwd"] * len(texts)})
    parquet.write_table(made.replace_schema_metadata(metadata), out, row_group_size=50)
    return out.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub whose dataset is all right, but for what stands beside its files."""
    with stand_in(StandIn({**HOSTILE, "data/train-0.parquet": table(TEXTS), "data/test-0.parquet": table(TEXTS[:9])})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr("flockstep.optim.data.hub.TRIES", 1)
        yield hub


def opened(
    home: Path, source: str = NAME, *, report: Callable[[Skip], None] = lambda skip: None, **config: Any
) -> TokenStream:
    data, config_ = Data(source=source, sequence_length=16), PeerConfig(home=home, **config)
    found = open_data(data, config_, skips=Skips(report))
    assert isinstance(found, TokenStream)
    return found


def words(stream: TokenStream) -> set[str]:
    sequences = [*stream.held_out(), *(item for unit in range(2) for item in stream.read(0, unit, 0))]
    text = " ".join(bytes(sequence.tolist()).decode().replace("\0", " ") for sequence in sequences)
    return {word for word in text.split() if word.isdigit() and len(word) == 5}


def test_only_the_files_of_the_split_are_read_at_the_commit_and_without_a_token(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert len(words(opened(tmp_path))) > 150
    assert set(hub.paths) == {f"/api/datasets/{REPOSITORY}/revision/{COMMIT}", f"{RESOLVED}data/train-0.parquet"}
    assert {token for _, token in hub.asked} == {None}


def test_the_users_token_goes_to_the_hub_for_what_the_user_named(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    opened(tmp_path, f"hf:{REPOSITORY}", data=f"hf:{REPOSITORY}")
    assert {token for _, token in hub.asked} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    "where",
    [
        *("http://127.0.0.1:9/router/reboot", "http://example.org/x", "https://10.0.0.1/x", "https://printer.home.arpa:9100/x"),
        *("https://intranet.corp/x", "https://hf.co.example.org/x", "https://cdn.hf.co:22/x", "http://hf.co/x"),
    ],
)
def test_no_file_is_fetched_from_elsewhere(hub: StandIn, tmp_path: Path, where: str) -> None:
    hub.redirects[f"{RESOLVED}data/train-0.parquet"] = where
    with pytest.raises(UsageError, match=r"the hub leads to .*, where none of its files may be"):
        opened(tmp_path)


@pytest.mark.parametrize("where", ["http://[", "https://xn--/x", "https://a\tb/x", "https://a.b:x/"])
def test_a_redirect_to_no_address_is_one_line(hub: StandIn, tmp_path: Path, where: str) -> None:
    hub.redirects[f"{RESOLVED}data/train-0.parquet"] = where
    with pytest.raises(UsageError, match=r"no address|[Ii]nvalid"):
        opened(tmp_path)


def test_what_a_redirect_may_lead_to(hub: StandIn) -> None:
    here = Hub("hf_secret")
    assert here._is_own(f"{hub.endpoint}/x")
    assert not here._is_own("https://cdn-lfs.hf.co/x")
    for url in (
        *("https://localhost/x", "https://[::1]/x", "https://169.254.169.254/x", "https://router.local/x", "file:///etc/passwd"),
        *("https://user@cdn.hf.co/x", "https://metadata.internal/x", "ftp://cdn.hf.co/x", "https://127.1/x", "", "https:///x"),
    ):
        with pytest.raises(OSError, match="the hub leads to"):
            here._is_own(url)


def test_redirects_in_a_circle_end(hub: StandIn, tmp_path: Path) -> None:
    hub.redirects[f"{RESOLVED}data/train-0.parquet"] = f"{RESOLVED}data/train-0.parquet"
    with pytest.raises(UsageError, match="redirected more than 3 times"):
        opened(tmp_path)


def test_an_endless_answer_is_read_to_where_it_was_asked_for(hub: StandIn, tmp_path: Path) -> None:
    hub.endless = True
    assert len(words(opened(tmp_path))) > 150


@pytest.mark.parametrize(("lie", "reason"), [({"cuts": True}, "ends after"), ({"commit": "a" * 40}, "answers with commit")])
def test_a_hub_that_answers_otherwise_than_it_lists_is_one_line(
    hub: StandIn, tmp_path: Path, lie: dict[str, Any], reason: str
) -> None:
    for name, value in lie.items():
        setattr(hub, name, value)
    with pytest.raises(UsageError, match=reason):
        opened(tmp_path)


def test_an_answer_that_drips_is_given_up(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.optim.data.hub.TIMEOUT", 1.0)
    hub.drips = True
    with pytest.raises(UsageError, match=r"sends less than 4 kB/s"):
        opened(tmp_path)
    hub.ended.set()


def test_a_slow_answer_is_read_as_long_as_its_average_is_enough() -> None:
    late = -1.0
    assert b"".join(steadily(iter([bytes(8000), b"a", b"bc"]), 8002, "it", late)) == bytes(8000) + b"ab"
    with pytest.raises(ConnectionError, match="it sends less than 4 kB/s"):
        list(steadily(iter([b"a"]), 8000, "it", late))


@pytest.mark.parametrize("size", [10**15, 2**63, 10**400, 3])
def test_a_size_that_lies_is_one_line(hub: StandIn, tmp_path: Path, size: int) -> None:
    hub.sizes["data/train-0.parquet"] = size
    with pytest.raises(UsageError, match=r"cannot open|has no parquet or JSON file|has no file of the split"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is no parquet"),
        ("train.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "row 1 is no JSON"),
        ("train.jsonl", b"[" * 100_000, "row 1 and all behind it cannot be read: is no JSON"),
        ("train.jsonl", b'{"text": ' + b"[" * 100_000, "row 1 is no JSON"),
        ("train.jsonl.gz", gzip.compress(b" " * 5000 + b'{"text": "' + b"x" * 5000, mtime=0), "row 1 is longer"),
        ("train.jsonl.gz", b"\x1f\x8b\x08 broken", "cannot open"),
        ("train.jsonl.gz", b"no gzip", "cannot open"),
        ("train.jsonl", b'{"text": "\xff"}\n', "row 1 is no UTF-8: byte 0xff in column 11"),
        ("train.jsonl.gz", gzip.compress(b" " * (1 << 20), mtime=0), "row 1 is longer"),
        ("train.jsonl.gz", gzip.compress(b"1" + b"\n" * (1 << 20), mtime=0), "row 1 is a number, no object with a column"),
        ("train.json.gz", gzip.compress(b"[1," + b" " * (3 << 20), mtime=0), "row 1 is a number, no object with a column"),
        ("train.zip", b"PK\3\4", "has no parquet or JSON file"),
        ("train.parquet", table([{"bytes": None, "path": "/etc/passwd"}] * 9), "has struct<.*>, no text, in the column"),
    ],
    ids=itertools.count(),
)
def test_a_file_of_another_kind_is_one_line(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, reason: str
) -> None:
    monkeypatch.setattr(rows, "MAX_DOCUMENT_BYTES", 1 << 12 if name.endswith(".gz") else 1 << 20)
    hub.files = {name: content}
    with pytest.raises(UsageError, match=reason):
        opened(tmp_path)


def test_metadata_of_a_file_that_calls_its_text_an_image_opens_nothing(hub: StandIn, tmp_path: Path) -> None:
    features = {"info": {"features": {"text": {"_type": "Image"}, "image": {"_type": "Image"}}}}
    hub.files = {"train.parquet": table(["/etc/passwd " * 9] * 50, huggingface=json.dumps(features))}
    assert b"/etc/passwd" in bytes(next(opened(tmp_path).read(0, 0, 0)).tolist())


def test_a_connection_that_breaks_while_training_is_one_line(hub: StandIn, tmp_path: Path) -> None:
    stream = opened(tmp_path)
    hub.cuts = True
    with pytest.raises(LocalError, match="cannot read hf:evil/ds"):
        list(stream.read(0, 0, 0))


def test_a_source_is_pinned_to_the_commit_of_the_day(hub: StandIn, tmp_path: Path) -> None:
    assert pinned_source(f"hf:{REPOSITORY}?column=x") == f"{NAME}?column=x"
    assert pinned_source(f"hf:{REPOSITORY}/data/x") == f"{NAME}/data/x"
    (tmp_path / "a").mkdir()
    for source in (NAME, "text:{stdlib}", f"hf:{tmp_path}/a"):
        assert pinned_source(source) == source
    hub.commit = "not a commit"
    with pytest.raises(UsageError, match="its present commit is not known: the hub names no commit"):
        pinned_source(f"hf:{REPOSITORY}")


def test_what_this_user_may_not_read_is_one_line_with_the_remedy(hub: StandIn, tmp_path: Path) -> None:
    hub.denies = True
    for token, why in (("", "no token was sent: `hf auth login`"), ("hf_mine", "this user's token may not read it")):
        with pytest.raises(OSError, match=f"401; if it is there, it is gated or private, and {why}") as refused:
            Hub(token).commit("models", REPOSITORY)
        assert "\n" not in str(refused.value)


def test_rows_without_text_are_skipped_wherever_they_stand(hub: StandIn, tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[3:3] = ['{"text": null}', '{"other": 1}', "7", '{"text": 5}', ""]
    for content in ("\n".join(lines), "\ufeff" + "\n".join(lines), f"[{','.join(line for line in lines if line)}]"):
        hub.files = {"train.json": content.encode()}
        assert len(words(opened(tmp_path))) > 150


def test_files_are_chosen_by_their_names_alone() -> None:
    names = ["a/train-0.parquet", "a/test-0.parquet", "b/x.parquet", "b/x.jsonl", "README.md", "trainer/x.csv"]
    assert chosen(names, "", "train", "x") == ("parquet", ["a/train-0.parquet"])
    assert chosen(names, "", "test", "x") == ("parquet", ["a/test-0.parquet"])
    assert chosen(names, "b", "train", "x") == ("parquet", ["b/x.parquet"])
    assert chosen(["y.jsonl", "x.json"], "", "train", "x") == ("json", ["x.json", "y.jsonl"])
    assert chosen(["data/validation/0.parquet"], "data", "validation", "x")[1] == ["data/validation/0.parquet"]
    for split, folder, reason in (("dev", "", "no file of the split dev"), ("train", "c", "no parquet or JSON")):
        with pytest.raises(UsageError, match=reason):
            chosen(names, folder, split, "x")


def test_long_documents_pass_the_tokenizer_in_pieces_and_few_at_a_time(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 texts of 16 MiB, which are 4 MB of gzip, would be 8 GiB of tokens."""
    lengths: list[int] = []
    encode = ByteTokenizer.encode

    def note(self: ByteTokenizer, documents: Sequence[str]) -> Any:
        lengths.append(sum(map(len, documents)))
        return encode(self, documents)

    monkeypatch.setattr(ByteTokenizer, "encode", note)
    monkeypatch.setattr(streams, "PIECE", 100)
    monkeypatch.setattr(streams, "TOGETHER", 1000)
    text = " ".join(TEXTS)
    hub.files = {"train.jsonl": json.dumps({"text": text}).encode() + b"\n" + json.dumps({"text": text + "."}).encode()}
    stream = opened(tmp_path)
    assert len([*stream.held_out(), *itertools.islice(stream.read(0, 0, 0), 500)]) >= 500
    assert max(lengths) <= 1000 + 100


def test_a_list_is_read_to_its_bracket_and_rows_without_text_end(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_BARE_ROWS", 1000)
    texts = json.dumps([{"text": text} for text in TEXTS]).encode()
    hub.files = {"train.json.gz": gzip.compress(texts + b"no JSON" * (1 << 20), 1, mtime=0)}
    assert len(words(opened(tmp_path))) > 150
    hub.files = {"train.jsonl": json.dumps({"text": TEXTS[0]}).encode() + b"\n" + b"\n" * 2000}
    skipped: list[Skip] = []
    list(itertools.islice(opened(tmp_path, report=skipped.append).read(0, 0, 0), 2))
    assert list(map(str, skipped)) == ["train.jsonl: 1,001 rows after one another have no text"]
