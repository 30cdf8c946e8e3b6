"""Publishing of checkpoints: whole or not at all, resumed, and a keeper goes on whatever a host answers."""

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trio
from flockstep.collectives.accountability.credit import PeerCredit
from flockstep.collectives.chain.certificate import certificate_hash
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Admission, Data, Manifest, Model, SignedManifest
from flockstep.optim.models.registry import build_model
from flockstep.peer import wire
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.wire.schema import decode
from flockstep.scripts.checkpoints.card import MAX_POINTS, Published, card_of, thinned
from flockstep.scripts.checkpoints.publish import Publisher, check_publishing, publish_newest
from flockstep.scripts.checkpoints.upload import open_target
from flockstep.scripts.peers.keep import describe_keeping
from safetensors.torch import load_file
from support.homes import home_of, kept_home
from support.shelves import Shelf, shelf_at

OWNER = Identity.from_seed(b"o" * 32)
SIZE = {"layers": 1, "heads": 1, "width": 8, "context": 8}
RUN = SignedManifest.sign(
    Manifest(
        owner=OWNER.peer_id,
        name="a <run>",
        data=Data("text:x"),
        model=Model("gpt", tuple((key, str(value)) for key, value in sorted(SIZE.items()))),
    ),
    OWNER,
)
LINK = JoinLink.parse(f"flockstep://{RUN.run_id}?via=/ip4/192.0.2.1/tcp/4001/p2p/{OWNER.peer_id}")
TARGETS = {"s3": "s3://b/models/mine", "hf": "hf://org/name"}
FILES = {"README.md", "flockstep.json", "gpt.json", "model.safetensors", "manifest.flockstep"}


@pytest.fixture(params=TARGETS)
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip({"s3": "boto3", "hf": "huggingface_hub"}[request.param])
    return str(request.param)


def use(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, endpoint: str = "") -> None:
    """The operator's environment."""
    for name, value in {
        "HF_ENDPOINT": endpoint or shelf.endpoint,
        "HF_TOKEN": "hf_mine",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "AWS_ENDPOINT_URL": endpoint or shelf.endpoint,
        "AWS_ACCESS_KEY_ID": "mine",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)


def newest(shelf: Shelf, kind: str) -> dict[str, bytes]:
    """The files that a reader of the newest published checkpoint finds."""
    if kind == "hf":
        return {name: data for name, data in shelf.commits[-1].items() if name} if shelf.commits else {}
    if (pointer := shelf.files.get("models/mine/latest.json")) is None:
        return {}
    told = json.loads(pointer)
    files = {name: shelf.files[f"models/mine/{told['folder']}/{name}"] for name in told["files"]}
    for name, data in files.items():
        assert told["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return files


def test_a_checkpoint_is_published_whole_with_its_card_and_certificate(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shelf_at(kind) as shelf:
        use(shelf, monkeypatch)
        assert publish_newest(LINK, tmp_path, TARGETS[kind], []) is None
        home_of(build_model("gpt", SIZE, seed=0), tmp_path, run=RUN.run_id, round_=0, keeper=RUN)
        assert publish_newest(LINK, tmp_path, TARGETS[kind], []) is None  # The start is certified by nobody.
        chain = kept_home(RUN, OWNER, tmp_path, 3)
        assert publish_newest(LINK, tmp_path, TARGETS[kind], [(2, 3.25)]) == 3
        files = newest(shelf, kind)
        assert files.keys() == FILES
        (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
        trained = build_model("gpt", SIZE, seed=3).state_dict()
        written = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in trained.items())
        told = json.loads(files["flockstep.json"])
        certificate = decode(wire.Certificate, bytes.fromhex(told["certificate"]), max_bytes=1 << 20)
        assert certificate == chain[-1]
        assert (told["run"], told["round"], told["tokens"]) == (RUN.run_id, 3, 300)
        assert SignedManifest.decode(files["manifest.flockstep"]).run_id == RUN.run_id
        card = files["README.md"].decode()
        assert "| 2 | 3.2500 |" in card
        assert f"`{OWNER.peer_id}` | 300 | 3 |" in card
        assert f"`{certificate_hash(chain[-1]).hex()}`, signed by 1" in card
        assert shelf.tokens == {{"s3": "mine", "hf": "hf_mine"}[kind]}
        assert len(shelf.commits) == (kind == "hf")
        sent = list(shelf.put)
        assert publish_newest(LINK, tmp_path, TARGETS[kind], []) == 3  # It is there.
        assert (shelf.put, len(shelf.commits)) == (sent, kind == "hf")
        kept_home(RUN, OWNER, tmp_path, 4)
        assert publish_newest(LINK, tmp_path, TARGETS[kind], [(4, 3.0)]) == 4
        assert "| 2 | 3.2500 |\n| 4 | 3.0000 |" in newest(shelf, kind)["README.md"].decode()  # It outlasts the keeper.
    assert not (tmp_path / "runs" / RUN.run_id / "publishing").exists()


def test_of_a_closed_run_nothing_is_published_that_only_its_members_may_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    closed = SignedManifest.sign(replace(RUN.manifest, admission=Admission(kind="invite")), OWNER)
    kept_home(closed, OWNER, tmp_path, 2)
    link = replace(LINK, run_id=closed.run_id)
    with shelf_at("hf") as shelf:
        use(shelf, monkeypatch)
        assert publish_newest(link, tmp_path, TARGETS["hf"], [(2, 3.25)]) == 2
        files = newest(shelf, "hf")
    assert files.keys() == FILES - {"manifest.flockstep"}
    assert json.loads(files["flockstep.json"]).keys() == {"run", "round", "root", "tokens"}
    card = files["README.md"].decode()
    assert "| 2 | 3.2500 |" in card
    assert not [text for text in (OWNER.peer_id, str(link), "certificate", "Who has trained") if text in card]


def test_an_upload_that_is_cut_publishes_nothing_and_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_home(RUN, OWNER, tmp_path, 1)
    with shelf_at(kind) as shelf:
        use(shelf, monkeypatch)
        shelf.breaks_at = "model.safetensors"
        with pytest.raises(LocalError, match="cannot upload to"):
            publish_newest(LINK, tmp_path, TARGETS[kind], [])
        assert newest(shelf, kind) == {}
        before, shelf.breaks_at = list(shelf.put), ""
        assert publish_newest(LINK, tmp_path, TARGETS[kind], []) == 1
        assert newest(shelf, kind).keys() == FILES
        if kind == "s3":
            again = [name.rpartition("/")[2] for name in shelf.put[len(before) :]]
            assert again == ["model.safetensors", "latest.json"]


def test_who_may_not_write_is_told_before_anything_is_exported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_home(RUN, OWNER, tmp_path, 1)
    monkeypatch.setattr("flockstep.scripts.checkpoints.export.export", None)
    with shelf_at(kind) as shelf:
        use(shelf, monkeypatch)
        shelf.refuses = True
        with pytest.raises(LocalError, match="403") as refused:
            publish_newest(LINK, tmp_path, TARGETS[kind], [])
        assert "\n" not in str(refused.value)
        assert "credentials" in refused.value.remedy
        assert (shelf.put, shelf.commits) == ([], [])


def test_a_host_that_is_gone_is_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with shelf_at(kind) as shelf:
        gone = shelf.endpoint
    use(shelf, monkeypatch, gone)
    with pytest.raises(LocalError, match=f"cannot upload to {TARGETS[kind]}: ") as refused:
        open_target(TARGETS[kind]).check()
    assert "\n" not in str(refused.value)


def test_a_keeper_goes_on_where_nothing_can_be_published_and_publishes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    telemetry, events = Telemetry(), list[Event]()

    async def keeps(shelf: Shelf) -> None:
        told, seen = trio.open_memory_channel[Event](9)
        token = trio.lowlevel.current_trio_token()
        telemetry.subscribe(events.append)
        telemetry.subscribe(partial(token.run_sync_soon, told.send_nowait))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Publisher(LINK, tmp_path, TARGETS["hf"], 2, telemetry).run)
            with trio.fail_after(120):
                assert (await seen.receive())["event"] == "checkpoint.unpublished"
                shelf.refuses = False
                telemetry.emit("eval.result", round=2, loss=2.5)
                await trio.to_thread.run_sync(lambda: telemetry.emit("checkpoint.written", round=2))
                while (event := await seen.receive())["event"] != "checkpoint.published":
                    pass
                assert (event["round"], event["to"]) == (2, TARGETS["hf"])
            nursery.cancel_scope.cancel()

    kept_home(RUN, OWNER, tmp_path, 2)
    with shelf_at("hf") as shelf:
        use(shelf, monkeypatch)
        shelf.refuses = True
        trio.run(keeps, shelf)
        assert "| 2 | 2.5000 |" in newest(shelf, "hf")["README.md"].decode()
    (failed,) = (event for event in events if event["event"] == "checkpoint.unpublished")
    assert describe_keeping(failed).startswith("nothing is published: cannot upload to hf://org/name: ")
    assert "\n" not in describe_keeping(failed)


def test_only_what_a_keeper_knows_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    def signed(source: str, model: str) -> SignedManifest:
        return SignedManifest.sign(
            Manifest(owner=OWNER.peer_id, name="x", data=Data(source), model=Model(model)), OWNER
        )

    monkeypatch.setattr("flockstep.scripts.checkpoints.upload.find_spec", lambda name: True)
    check_publishing(signed("text:x", "hf:llama"), "s3://b")
    for source, model in (("own", "gpt"), ("text:x", "my:model")):
        with pytest.raises(UsageError, match="custom code"):
            check_publishing(signed(source, model), "s3://b")
    with pytest.raises(UsageError, match="cannot upload to 'b'"):
        check_publishing(signed("text:x", "gpt"), "b")
    monkeypatch.setattr("flockstep.scripts.checkpoints.publish.find_spec", lambda name: None)
    with pytest.raises(LocalError, match="needs torch"):
        check_publishing(signed("text:x", "gpt"), "s3://b")


def test_a_card_shows_names_of_strangers_as_texts_and_a_long_curve_thinned() -> None:
    published = Published(
        signed=RUN,
        link=str(LINK),
        round=3,
        root="ab" * 32,
        tokens=300,
        certificate="",
        signers=0,
        curve=[(round_, 1.0) for round_ in range(1, 1001)],
        credit=[PeerCredit("peer", 5, 2)],
        credit_from=7,
        names={"peer": "<img src=x>|[a](b)\n# c"},
    )
    card = card_of(published, "peft", "org/base")
    assert card.startswith("---\nlibrary_name: peft\nbase_model: org/base\n")
    assert "certificate |" not in card
    assert "since round 7" in card
    (row,) = (line for line in card.splitlines() if "`peer`" in line)
    assert row.count("|") == 5
    assert not {"<", "[", "("} & set(row)
    assert "# a &#60;run&#62;" in card
    points = [line for line in card.splitlines() if line.endswith("| 1.0000 |")]
    assert len(points) == MAX_POINTS
    assert points[-1].startswith("| 1,000 |")
    assert thinned([]) == []
    assert thinned([(1, 2.0)]) == [(1, 2.0)]
