"""Chats: rendered by their tokenizer's template when they are packed, and learned from their answers alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from flockstep.dht.run.manifest import Data
from flockstep.optim.micro_batches import MicroBatches
from flockstep.optim.models.registry import build_model, training_loss
from flockstep.optim.shards.chat import ChatTemplate
from flockstep.optim.shards.opening import keep_tokenizer, open_corpus
from flockstep.optim.shards.reader import TokenShards
from flockstep.optim.shards.tokenizer_config import config_beside, decode_config, encode_config
from flockstep.peer.config import PeerConfig
from flockstep.peer.errors import UsageError
from flockstep.peer.telemetry import Telemetry
from flockstep.scripts.pack import pack_data
from support.packed import train_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "once?"},
    {"role": "assistant", "content": "upon a time"},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "they flew"},
]


def test_answers_are_what_a_turn_of_the_assistant_adds() -> None:
    rendered = ChatTemplate(TEMPLATE, {"bos_token": "^", "eos_token": "$"}).render(CHAT)
    assert rendered is not None
    assert rendered.text == "^<user>once?$\n<assistant>upon a time$\n<user>and then?$\n<assistant>they flew$\n"
    assert [rendered.text[start:stop] for start, stop in rendered.answers] == ["upon a time$\n", "they flew$\n"]
    shared = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]
    assert ChatTemplate(TEMPLATE, {"bos_token": "^", "eos_token": "$"}).render(shared) == rendered
    assert ChatTemplate(TEMPLATE, {}).render(CHAT[:1]) is None
    assert ChatTemplate(TEMPLATE, {}).render(None) is None


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for", "is no Jinja"),
        ("{{ raise_exception('only once') }}", "refuses a chat: only once"),
        ("{{ messages[9].content }}", "refuses a chat"),
        ("{{ messages|length }}{{ messages[-1].content }}", "does not add an answer behind the chat before it"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses a chat"),
        ("{% set x = messages.append(1) %}", "refuses a chat"),
        ("{% for i in range(10000000) %}{% endfor %}", "refuses a chat"),
        ("{{ cycler.__init__.__globals__.os.system('touch owned') }}", "refuses a chat"),
    ],
)
def test_a_template_that_is_none_or_breaks_out_is_one_line(
    template: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=reason) as refused:
        ChatTemplate(template, {}).render(CHAT)
    assert refused.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chat", [["hello"], [{"role": "user"}], [{"role": 1, "content": "x"}], [{"content": ["x"]}]])
def test_what_is_no_message_is_one_line(chat: Any) -> None:
    with pytest.raises(UsageError, match="has no role or no content"):
        ChatTemplate(TEMPLATE, {}).render(chat)


def test_a_template_is_found_beside_the_tokenizer(tmp_path: Path) -> None:
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    with pytest.raises(UsageError, match="has no chat template"):
        ChatTemplate.beside(path)
    config.write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": {"content": "$"}, "bos_token": None}))
    rendered = ChatTemplate.beside(path).render(CHAT[:2])
    assert rendered is not None
    assert rendered.text.startswith("<user>once?$")
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    config.write_text(json.dumps({"chat_template": several}))
    assert ChatTemplate.beside(path).render(CHAT) is not None
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('this one') }}")
    with pytest.raises(UsageError, match="this one"):
        ChatTemplate.beside(path).render(CHAT)
    (tmp_path / "chat_template.jinja").unlink()
    for content in ("[]", "{", "[" * 100_000):
        config.write_text(content)
        with pytest.raises(UsageError, match=r"has no chat template|cannot read the chat template"):
            ChatTemplate.beside(path)


def test_of_what_lies_beside_a_tokenizer_texts_alone_travel(tmp_path: Path) -> None:
    about = {
        "chat_template": TEMPLATE, "eos_token": {"content": "$"}, "bos_token": None, "pad_token": 3,
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Evil",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    config = config_beside(tmp_path / "tokenizer.json")
    assert config == {"chat_template": TEMPLATE, "eos_token": "$"}
    path = tmp_path / "packed.json"
    path.write_bytes(encode_config(config))
    assert decode_config(path) == config
    assert json.loads(path.read_bytes()).keys() == {"tokenizer_class", *config}
    assert decode_config(tmp_path / "none.json") == {}
    path.write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    assert decode_config(path) == config  # Whoever has packed it.
    for content in ("[]", "{", "[" * 100_000, '{"eos_token": 3}'):
        path.write_text(content)
        with pytest.raises(UsageError, match="has another form"):
            decode_config(path)
    with pytest.raises(UsageError, match="take more than 1 MiB"):
        encode_config({"chat_template": "x" * (1 << 20)})


def test_packed_chats_give_their_answers_as_targets_alone(tmp_path: Path) -> None:
    content = train_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}))
    rows = [{"messages": CHAT}, {"messages": CHAT[:1]}] * 500
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said: list[str] = []
    pack_data(f"json:{tmp_path}/chats.jsonl", tmp_path / "p", said.append, tokenizer=str(tmp_path), chat=True)
    assert "500 rows without an answer were left out." in said
    data = Data(source=f"tokens:{tmp_path}/p", sequence_length=32)
    source = open_corpus(data, PeerConfig(home=tmp_path / "home", data=data.source))
    assert isinstance(source, TokenShards)
    assert source.index.masked
    keep_tokenizer(source, PeerConfig(home=tmp_path / "home"), tmp_path / "kept")
    assert (tmp_path / "kept" / "tokenizer.json").read_bytes() == content
    config = decode_config(tmp_path / "kept" / "tokenizer_config.json")
    assert config == {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    raw = np.fromfile(tmp_path / "p" / "00000.u16", "<u2").astype(np.int64)
    learned, context = raw[raw < 1 << 15], raw[raw >= 1 << 15] - (1 << 15)
    lines = tokenizer.decode(learned.tolist()).split("\n")[:-1]
    assert lines == (["upon a time", "they flew"] * len(lines))[: len(lines)]
    assert len(lines) > 100
    assert tokenizer.decode(context.tolist()).startswith("<user>once?\n<assistant><user>and then?\n<assistant><user>once?")
    item = next(source.read(0, 0, 0))
    assert (item < 0).any()
    assert (item >= 0).any()
    with pytest.raises(UsageError, match="--chat needs a tokenizer"):
        pack_data(f"json:{tmp_path}/chats.jsonl", tmp_path / "q", said.append, chat=True)


def test_context_has_no_loss_in_any_model() -> None:
    model = build_model("gpt", {"size": "0.2m"}, seed=0)
    tokens = torch.arange(1, 34).repeat(2, 1)
    masked = tokens.clone()
    masked[:, :20] = ~masked[:, :20]
    with torch.no_grad():
        logits = model(tokens[:, :-1])
        expected = torch.nn.functional.cross_entropy(logits[:, 19:].flatten(0, 1), tokens[:, 20:].flatten())
    assert torch.allclose(training_loss(model, masked), expected)
    assert torch.isfinite(training_loss(model, ~tokens))
    transformers = pytest.importorskip("transformers")
    del transformers
    options = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    other = build_model("hf:llama", options, seed=0)
    with torch.no_grad():
        logits = other(input_ids=tokens).logits
        expected = torch.nn.functional.cross_entropy(logits[:, 19:-1].flatten(0, 1), tokens[:, 20:].flatten())
        assert torch.allclose(training_loss(other, masked), expected, atol=1e-5)


def test_micro_batches_count_by_their_answers() -> None:
    tokens = torch.randint(0, 256, (6, 17), generator=torch.Generator().manual_seed(1))
    tokens[0, :] = ~tokens[0, :]
    tokens[1, :12] = ~tokens[1, :12]
    tokens[4:, 3:] = ~tokens[4:, 3:]
    gradients = []
    for size in (6, 1):
        model = build_model("gpt", {"size": "0.2m"}, seed=0)
        passes = MicroBatches(model, training_loss, Telemetry(), batch_size=6, size=size)
        loss = passes.backward(tokens)
        assert loss is not None
        gradients.append((loss, [parameter.grad for parameter in model.parameters()]))
    (whole, expected), (pieces, found) = gradients
    assert torch.allclose(whole, pieces, rtol=1e-5)
    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, atol=1e-6)
