"""A run on packed data with a tokenizer of its own: two peers with empty homes and nothing but the link."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from flockstep.dht.run.manifest import load_manifest
from flockstep.peer.base.config import PeerConfig
from flockstep.scripts.runs.run import create_run
from support.bootstraps import kept
from support.commands import Command, flockstep
from support.hub import COMMIT, REPOSITORY, StandIn, stand_in
from support.packed import STORIES, train_tokenizer

pytest.importorskip("tokenizers")

RUN = """
name = "packed"
[model]
size = "0.2m"
vocab_size = 300
[data]
source = "tokens:hf://datasets/{repository}@{commit}/sample"
sequence_length = 32
batch_size = 4
[inner]
steps = 4
[outer]
rounds = 3
[admission]
voters = "members"
[eval]
every = 1
prompts = ["once upon"]
"""


def test_two_peers_train_on_packed_data_by_the_link_alone(
    bootstrap_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, story in enumerate(STORIES * 4):
        (tmp_path / "books" / f"{number // 100}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / f"{number // 100}" / f"{number}.txt").write_text(story)
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    pack = ["data", "pack", str(tmp_path / "books"), "--to", str(tmp_path / "p"), "--tokenizer", str(tmp_path / "tokenizer")]
    packing = flockstep(*pack, "--shard-tokens", "16384")
    assert packing.returncode == 0, packing.stderr
    assert "Packed 1,600 documents of 1,600 files into" in packing.stdout
    refused = flockstep(*pack)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    shards = sorted(path.name for path in (tmp_path / "p").glob("0*.u16"))
    with stand_in(StandIn({f"sample/{path.name}": path.read_bytes() for path in (tmp_path / "p").iterdir()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        toml = tmp_path / "run.toml"
        toml.write_text(RUN.format(repository=REPOSITORY, commit=COMMIT))
        link = create_run(toml, [bootstrap_address], PeerConfig(home=tmp_path / "owner"), lambda line: None)
        data = load_manifest(tmp_path / "packed.flockstep").manifest.data
        assert (data.tokenizer, data.source[:7]) == ("tokenizer.json", "tokens:")
        hub.asked.clear()
        with kept(link, tmp_path / "owner"):
            peers = [
                Command(
                    *("join", link, "--home", str(tmp_path / name), "--host", "127.0.0.1", "--port", "0", "--threads", "1"),
                    *("--json", "--yes", "--save", str(tmp_path / f"{name}.safetensors")),
                    stderr=subprocess.PIPE,
                    env=dict(os.environ),
                )
                for name in ("a", "b")
            ]
            outputs = [peer.communicate(timeout=240) for peer in peers]
            assert [peer.returncode for peer in peers] == [0, 0], outputs
        events = [[json.loads(line) for line in out.splitlines()] for out, _ in outputs]
    for told in events:
        assert [event["units"] for event in told if event["event"] == "data.shared"] == [len(shards)]
        assert not [event for event in told if event["event"] == "eval.skipped"]
    assert any(event["event"] == "round.done" and event["round"] == 3 for told in events for event in told)
    texts = [event["texts"] for told in events for event in told if event["event"] == "eval.result" and event["texts"]]
    assert texts
    asked = [path.rpartition("/")[2] for path in hub.paths]
    read = [name for name in asked if name.endswith(".u16") and name != "held-out.u16"]
    # Who starts at the same moment as another one may lease the same unit at first; nobody reads a shard twice.
    assert max(Counter(read).values()) <= 2
    assert 2 <= len(set(read)) < len(shards)
    for name in ("a", "b"):
        assert 1 <= len(list((tmp_path / name / "cache" / "shards").glob("*.shard"))) <= len(set(read)) + 1
    assert (tmp_path / "a.safetensors").is_file()
    home = str(tmp_path / "a")
    evaluated = flockstep("eval", home, "--home", home, "--data", f"{tmp_path}/p", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    found, measured = json.loads(evaluated.stdout), [event for event in events[0] if event["event"] == "eval.measured"]
    assert (found["round"], found["samples"][0]["prompt"]) == (3, "once upon")
    for event in measured:
        if (event["round"], event["tokens"]) == (3, found["tokens"]):  # As long as the peer had time for.
            assert event["loss"] == pytest.approx(found["loss"], abs=0.01)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = """
name = "chats"
[model]
name = "hf:llama"
vocab_size = 300
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[data]
source = "tokens:{folder}"
sequence_length = 32
batch_size = 4
[inner]
steps = 4
[outer]
rounds = 100000
[admission]
voters = "members"
[eval]
every = 1
prompts = ["<|im_start|>user\\nonce?<|im_end|>\\n<|im_start|>assistant\\n"]
"""


class Joined:
    """A `flockstep join` with an empty home and the link, whose events are read one by one."""

    def __init__(self, link: str, home: Path) -> None:
        place = ("--home", str(home), "--host", "127.0.0.1", "--port", "0", "--threads", "1")
        self.home = home
        self.process = Command("join", link, *place, "--json", "--yes", env=dict(os.environ))
        self.events: list[dict[str, object]] = []

    def until(self, reached: Callable[[dict[str, object]], bool]) -> None:
        """Read events until one for which this is so."""
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if reached(self.events[-1]):
                return
        raise AssertionError(self.events[-5:])


@contextmanager
def joined(link: str, home: Path) -> Iterator[Joined]:
    """A `flockstep join` that is killed at the end."""
    peer = Joined(link, home)
    with peer.process:
        try:
            yield peer
        finally:
            peer.process.kill()


def test_members_provide_chats_and_their_template_once_the_owner_has_gone(
    bootstrap_address: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(tmp_path / "tokenizer" / "tokenizer.json", special_tokens=["<|im_start|>", "<|im_end|>"])
    about = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))
    answers = [{"role": "user", "content": "once?"}, {"role": "assistant", "content": ""}]
    rows = [{"messages": [answers[0], answers[1] | {"content": story}]} for story in STORIES]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pack = ["data", "pack", str(tmp_path / "chats.jsonl"), "--to", str(tmp_path / "p")]
    pack += ["--tokenizer", str(tmp_path / "tokenizer")]
    flockstep(*pack, "--chat", check=True)
    num_shards = len(list((tmp_path / "p").glob("*.u16")))
    toml = tmp_path / "run.toml"
    toml.write_text(CHATS.format(folder=tmp_path / "p"))
    said: list[str] = []
    link = create_run(toml, [bootstrap_address], PeerConfig(home=tmp_path / "owner"), said.append)
    assert any("keep or join it from this home folder until members have them" in line for line in said)
    with ExitStack() as stack:
        with kept(link, tmp_path / "owner"):
            first = stack.enter_context(joined(link, tmp_path / "a"))
            # It fetches what it trains, and then the rest, for others.
            first.until(lambda event: len(list((tmp_path / "a").rglob("*.shard"))) == num_shards)
            second = stack.enter_context(joined(link, tmp_path / "b"))
            second.until(lambda event: event["event"] == "eval.result" and bool(event["texts"]))
        (tmp_path / "p").rename(tmp_path / "gone")
        newcomer = stack.enter_context(joined(link, tmp_path / "c"))
        newcomer.until(lambda event: event["event"] == "step")
    for peer in (second, newcomer):
        assert not [event for event in peer.events if event["event"] in ("eval.skipped", "model.not_kept")]
        assert list(peer.home.rglob("*.shard"))
        assert list(peer.home.rglob("model/tokenizer.json"))
    exported = flockstep("export", str(tmp_path / "b"), str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    asked = tokenizer.apply_chat_template(answers[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(asked["input_ids"][0]) == "<|im_start|>user\nonce?<|im_end|>\n<|im_start|>assistant\n"
    assert model.generate(**asked, max_new_tokens=4, do_sample=False).shape[1] > asked["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
