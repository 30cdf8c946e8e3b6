"""Chats: rendered by their tokenizer's template when they are packed, and learned from their answers alone."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from flockstep.dht.run.manifest import Data
from flockstep.optim.data.controls import without_noncharacters
from flockstep.optim.data.tokenizer import FileTokenizer
from flockstep.optim.models.registry import build_model, separates, training_loss
from flockstep.optim.packing.chat import ChatTemplate, chat_of
from flockstep.optim.shards.opening import keep_tokenizer, open_tokens, tokenizer_of
from flockstep.optim.shards.tokenizer_config import config_beside, decode_config, encode_config
from flockstep.optim.step.examples import BEGINS, ids_of, numbers_of, positions_of
from flockstep.optim.step.micro_batches import MicroBatches, target_share
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import LocalError, UsageError
from flockstep.peer.log.telemetry import Telemetry
from flockstep.scripts.runs.pack import pack_data
from hypothesis import given
from hypothesis import strategies as st
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


def pack_here(source: str, to: Path, said: list[str], **options: Any) -> None:
    pack_data(source, str(to), said.append, home=to.parent / "home", **options)


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
        ("{{ messages|length }}{{ messages[-1].content }}", "a chat has 'content', which .* does not render"),
        ("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}", "does not add an answer behind"),
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


@pytest.mark.parametrize("chat", [["hello"], [{"role": 1, "content": "x"}], [{"content": ["x"]}]])
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
    pack_here(f"json:{tmp_path}/chats.jsonl", tmp_path / "p", said, tokenizer=str(tmp_path), chat=True)
    assert "500 rows without an answer were left out." in said
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows[1::2])))
    with pytest.raises(UsageError, match=r"no row of json:.* is a chat with an answer"):
        pack_here(f"json:{tmp_path}/asked.jsonl", tmp_path / "q", said, tokenizer=str(tmp_path), chat=True)
    assert not (tmp_path / "q").exists()
    source = open_tokens(Data("own", sequence_length=32), PeerConfig(home=tmp_path / "home", data=f"{tmp_path}/p"))
    assert source.index.masked
    keep_tokenizer(source, tmp_path / "home", tmp_path / "kept")
    assert (tmp_path / "kept" / "tokenizer.json").read_bytes() == content
    config = decode_config(tmp_path / "kept" / "tokenizer_config.json")
    assert config == {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    raw = np.fromfile(tmp_path / "p" / "00000.u16", "<u2").astype(np.int64)
    learned, context = raw[raw < 1 << 15], raw[raw >= 1 << 15] & (1 << 14) - 1
    lines = tokenizer.decode(learned.tolist()).split("\n")[:-1]
    assert lines == (["upon a time", "they flew"] * len(lines))[: len(lines)]
    assert len(lines) > 100
    begins = np.flatnonzero(raw & 1 << 14)
    one, other = (tokenizer.decode((raw[at : at + 3] & (1 << 14) - 1).tolist()) for at in begins[:2])
    assert one == other == "<user>"[: len(one)]
    assert (raw[begins] >= 1 << 15).all()
    assert begins[0] == 0
    assert tokenizer.decode(context.tolist()).startswith("<user>once?\n<assistant><user>and then?\n<assistant><user>once?")
    item = next(source.read(0, 0, 0))
    assert (item < 0).any()
    assert source.has_examples
    assert numbers_of(torch.stack(list(source.read(0, 0, 0)))).amax() >= 1
    assert (item >= 0).any()
    with pytest.raises(UsageError, match="chats need a tokenizer"):
        pack_here(f"json:{tmp_path}/chats.jsonl", tmp_path / "q", said, chat=True)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT[:2]},
        {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in CHAT[:2]]},
        {"messages": None, "prompt": "once?", "completion": "upon a time"},
        {"prompt": CHAT[:1], "completion": CHAT[1:2]},
        {"instruction": "once?", "input": "", "output": "upon a time"},
        CHAT[:2],
    ],
)
def test_a_row_is_a_list_of_messages_or_a_question_and_its_answer(row: Any) -> None:
    rendered = ChatTemplate(TEMPLATE, {"eos_token": "$"}).render(chat_of(row, "messages"))
    assert rendered is not None
    assert rendered.text == "<user>once?$\n<assistant>upon a time$\n"


def test_an_instruction_has_its_input_and_a_row_with_neither_is_no_chat() -> None:
    chat = chat_of({"instruction": "Add.", "input": "1, 2", "output": "3"}, "messages")
    assert isinstance(chat, list)
    assert [message["content"] for message in chat] == ["Add.\n\n1, 2", "3"]
    for row in ({"text": "once"}, {"prompt": "once?", "completion": None}, {"prompt": CHAT[:1], "completion": "x"}, 7):
        assert chat_of(row, "messages") in (None, 7)


LAST_OTHERWISE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}(thought){% endif %}{{ m.content }}|"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
GENERATED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{% if loop.last %}(last){% endif %}"
    "{{ m.content }}|{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)
OPENED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>(thinks)\n{% endif %}"
)
SYSTEM_LAST = (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
    "{% if m.role == 'user' and loop.index >= loop.length - 1 and messages[0].role == 'system' %}{{ messages[0].content }}: "
    "{% endif %}{{ m.content|trim }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
IN_PAIRS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Q: {{ messages[loop.index0 - 1].content }} A: {{ m.content }}|"
    "{% endif %}{% endfor %}"
)
DATED = "{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("template", "chat", "answers", "num_unfound"),
    [
        (LAST_OTHERWISE, CHAT, ["(thought)they flew|"], 1),
        (GENERATED, CHAT, ["upon a time|", "(last)they flew|"], 0),
        (OPENED, CHAT, ["upon a time|", "they flew|"], 0),
        (SYSTEM_LAST, [SYSTEM, *CHAT], ["they flew|"], 1),
        (SYSTEM_LAST, [CHAT[0], {"role": "model", "content": " upon a time "}], ["upon a time|"], 0),
        (DATED, CHAT, ["upon a time$\n", "they flew$\n"], 0),
    ],
)
def test_an_answer_is_what_stands_in_the_whole_rendering(
    template: str, chat: list[dict[str, str]], answers: list[str], num_unfound: int
) -> None:
    rendered = ChatTemplate(template, {"eos_token": "$"}).render(chat)
    assert rendered is not None
    assert [rendered.text[start:stop] for start, stop in rendered.answers] == answers
    assert rendered.num_unfound == num_unfound


REVERSED = "{% for m in messages|reverse %}{{ m.content }}|{% endfor %}"


@pytest.mark.parametrize("template", [IN_PAIRS, REVERSED, "{% generation %}" + TEMPLATE + "{% endgeneration %}"])
def test_no_words_of_another_speaker_are_learned(template: str) -> None:
    with pytest.raises(UsageError, match="does not add an answer"):
        ChatTemplate(template, {}).render(CHAT[:2])


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLING = (
    "{{ tools|tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ '(' + m.thought + ')' if m.thought }}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function|tojson }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


CALLED = '{"name": "weather", "arguments": {"city": "Oslo"}}|'
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3 C", "tool_call_id": "1", "name": "weather"}
SHARED = [{"from": "human", "value": "once?", "weight": 0.0}, {"from": "gpt", "value": "no", "weight": 0}]
TRAIN = [CHAT[0], {**CHAT[1], "train": False}, CHAT[2], {**CHAT[3], "train": True, "name": None}]


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"messages": [CHAT[0], CALLS, RESULT, CHAT[3]]}, [CALLED, "they flew|"]),
        ({"messages": [CHAT[0], {**CHAT[1], "thought": "hm"}], "tools": '[{"name": "<weather>"}]'}, ["(hm)upon a time|"]),
        ({"conversations": [*SHARED, *CHAT[2:]]}, ["they flew|"]),
        ({"messages": TRAIN}, ["they flew|"]),
        ({"messages": [CHAT[0], {"role": "assistant", "content": " "}, *CHAT[2:]], "id": "7"}, ["they flew|"]),
        ({"system": "Be brief.", "prompt": "once?", "completion": "upon a time"}, ["upon a time|"]),
    ],
)
def test_what_the_template_renders_of_a_row_is_learned(row: dict[str, Any], answers: list[str]) -> None:
    rendered = ChatTemplate(CALLING, {}).render(chat_of(row, "messages"), row)
    assert rendered is not None
    assert [rendered.text[start:stop] for start, stop in rendered.answers] == answers
    first = '[{"name": "<weather>"}]' if "tools" in row else "<system>Be brief." if "system" in row else "<user>once?"
    assert rendered.text.startswith(first)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]}, "a chat has 'tool_calls'"),
        ({"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "hm"}]}, "does not add an answer behind"),
        ({"messages": [CHAT[0], CHAT[1], {"role": "user", "text": "hm"}, CHAT[3]]}, "a chat has 'text'"),
        ({"messages": [{**CHAT[0], "name": "Ada"}, CHAT[1]]}, "a chat has 'name'"),
        ({"messages": CHAT, "tools": [CALL]}, "a chat has 'tools'"),
        ({"messages": CHAT, "chat_template_kwargs": {"today": "Monday"}}, "a chat has 'today'"),
        ({"messages": CHAT, "images": ["x.png"]}, "a chat has 'images'"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, r"role assistant has the weight \[0.5\]"),
        ({"messages": [{**CHAT[0], "train": True}, CHAT[1]]}, r"role user has the weight \[True\]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]}, "no content that is text"),
    ],
)
def test_a_row_that_says_more_than_the_template_renders_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        ChatTemplate(TEMPLATE, {}).render(row["messages"], row)


FORGED = ("<|end|>", "<|", "user", "|>", "end|>", "<think>", "</think>", " hello", "\ufdd0260\ufdd1", "\ufdd4260\ufdd5")
WITH_CONTROLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.more }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def with_controls() -> FileTokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return FileTokenizer(Path("tokenizer.json"), tokenizer.to_str().encode(), "<|end|>")


BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
CONTROLLED = with_controls()


@cache
def controlled_template() -> ChatTemplate:
    return ChatTemplate(WITH_CONTROLS, {}, CONTROLLED.controls)


@given(st.lists(st.sampled_from(FORGED)).map("".join), st.lists(st.sampled_from(FORGED)).map("".join))
def test_no_text_of_a_chat_makes_a_control_token(asked: str, more: str) -> None:
    question = {"role": "user", "content": asked, "more": more}
    messages = [question, {**question, "role": "assistant", "content": f"I see {asked}"}]
    rendered = controlled_template().render(messages)
    assert rendered is not None
    ((tokens, begins),) = CONTROLLED.encode_at([rendered.text])
    assert [int(token) for token in tokens if token >= len(BYTES)] == [257, 256, 258, 256]
    assert CONTROLLED.controls.read(rendered.text).startswith(f"<|user|>{without_noncharacters(asked)}")
    ((start, stop),) = rendered.answers
    assert tokens[np.flatnonzero((begins >= start) & (begins < stop))[-1]] == 256


@pytest.mark.parametrize("bomb", ["{{ 'a' * 10000000000 }}", "{{ messages[0].content * 10000000000 }}"])
def test_a_template_that_takes_all_memory_is_one_line(bomb: str) -> None:
    with pytest.raises(LocalError, match=r"chat template (cannot be read: MemoryError|ends the process that reads it)"):
        ChatTemplate(bomb, {}).render(CHAT)


def test_a_thought_in_an_answer_is_rendered_by_the_template_or_refused() -> None:
    thinks = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}"
        "{{ m.content }}<|end|>{% endfor %}"
    )
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nupon a time"}]
    rendered = ChatTemplate(thinks, {}, CONTROLLED.controls).render(chat)
    assert rendered is not None
    ((start, stop),) = rendered.answers
    assert CONTROLLED.controls.read(rendered.text[start:stop]) == "<|assistant|><think>hm</think>upon a time<|end|>"
    assert CONTROLLED.controls.names["<think>"] in rendered.text
    cuts = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    with pytest.raises(UsageError, match="an answer has </think>, which"):
        ChatTemplate(cuts, {}, CONTROLLED.controls).render(chat)


def test_a_row_that_is_no_chat_costs_that_row_and_is_named(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    once = "{% if messages|length > 2 %}{{ raise_exception('one turn alone') }}{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": once + TEMPLATE}))
    rows = [json.dumps({"messages": CHAT[:2]})] * 100
    rows[3:3] = [
        json.dumps({"messages": CHAT}),
        json.dumps({"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": []}]}),
        '{"messages": ',
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    said: list[str] = []
    pack_here(f"{tmp_path}/x.jsonl", tmp_path / "p", said, tokenizer=str(tmp_path), chat=True)
    assert said[0].startswith("Packed 100 documents")
    assert said[1] == "1 rows without an answer were left out."
    assert said[2].startswith("What could not be read was left out, 2 in all, such as ")
    assert "x.jsonl: row 4 is left out: the tokenizer's chat template refuses a chat: one turn alone" in said[2]


def test_a_document_ends_with_the_token_that_the_tokenizers_config_names(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json", special_tokens=["<EOT>"])
    (tmp_path / "x.txt").write_text("once upon a time " * 2000)
    said: list[str] = []
    pack_here(f"{tmp_path}/x.txt", tmp_path / "p", said, tokenizer=str(tmp_path))
    assert any(line.startswith("No token ends a document") for line in said)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<EOT>"}}))
    said.clear()
    pack_here(f"{tmp_path}/x.txt", tmp_path / "q", said, tokenizer=str(tmp_path))
    assert not any(line.startswith("No token ends a document") for line in said)
    for name, end in ("p", None), ("q", 0):
        config = PeerConfig(home=tmp_path / "home", data=f"{tmp_path}/{name}")
        assert tokenizer_of(open_tokens(Data("own", sequence_length=8), config), config.home).end == end
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in sorted((tmp_path / "q").glob("0*.u16"))])
    assert (int(tokens[-1]), int((tokens == 0).sum())) == (0, 1)


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


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {"size": "0.2m", "vocab_size": 64},
    "hf:llama": TINY | {"intermediate_size": 48},
    "hf:qwen3": TINY | {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2},
    "hf:mixtral": TINY | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 2},
    "hf:gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
    "hf:gemma3_text": TINY | {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_examples_of_one_sequence_have_the_loss_that_each_has_alone(kind: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build_model(kind, KINDS[kind], seed=0).eval()
    for parameter in model.parameters():  # The zeros that it starts with would hide what the blocks do.
        torch.nn.init.normal_(parameter, std=0.1)
    lengths, tokens = (5, 9, 3), torch.randint(64, (17,))
    examples: Sequence[torch.Tensor] = tokens.split(lengths)  # type: ignore[no-untyped-call]  # of torch
    for example in examples:
        example[0] = ~(example[0] | BEGINS)
    assert separates(model)
    with torch.no_grad():
        packed_loss = training_loss(model, tokens[None], separate=True)
        joined_loss = training_loss(model, tokens[None])
        alone = [training_loss(model, example[None]) * (len(example) - 1) for example in examples]
    assert torch.allclose(packed_loss, sum(alone) / 14, rtol=1e-5)  # type: ignore[arg-type]  # a sum of tensors
    assert not torch.allclose(packed_loss, joined_loss, rtol=1e-4)


def test_a_chunked_loss_keeps_examples_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    model = build_model("hf:llama", KINDS["hf:llama"], seed=0)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    tokens[:, 8] = ~(tokens[:, 8] | BEGINS)
    whole = training_loss(model, tokens, separate=True)
    monkeypatch.setattr("flockstep.optim.models.head.CHUNK_BYTES", 1000)
    assert torch.allclose(training_loss(model, tokens, separate=True), whole, rtol=1e-5)
    assert not torch.allclose(training_loss(model, tokens), whole, rtol=1e-5)


def test_what_cannot_keep_examples_apart_says_so() -> None:
    pytest.importorskip("transformers")

    class Plain(torch.nn.Module):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    assert not separates(Plain())
    lfm2 = TINY | {"intermediate_size": 48, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    assert not separates(build_model("hf:lfm2", lfm2, seed=0))
    mamba = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4, "intermediate_size": 64}
    assert not separates(build_model("hf:mamba", mamba, seed=0))
    assert not separates(build_model("hf:bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}, seed=0))


def test_positions_and_numbers_begin_with_each_example() -> None:
    tokens = torch.tensor([[3, 4, BEGINS | 5, 6, 7, ~(BEGINS | 8)], [~BEGINS, ~1, 2, 3, BEGINS, BEGINS]])
    assert ids_of(tokens).tolist() == [[3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 0]]
    assert positions_of(tokens).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0]]
    assert numbers_of(tokens).tolist() == [[0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 2, 3]]


def test_batches_of_one_step_count_by_their_answers() -> None:
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(1))
    tokens[0, 2:] = ~tokens[0, 2:]
    tokens[1, :] = ~tokens[1, :]
    gradients = []
    for batches in ([tokens], list(tokens.split(2))):  # type: ignore[no-untyped-call]  # of torch
        model = build_model("gpt", {"size": "0.2m"}, seed=0)
        passes, shares = MicroBatches(model, training_loss, Telemetry(), batch_size=4), 0.0
        for batch in batches:
            passes.backward(batch, target_share(batch))
            shares += target_share(batch)
        gradients.append([parameter.grad / shares for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


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
