"""Fine-tune a transformers language model with LoRA (peft): only the adapters are sent.

    python examples/lora.py          # publishes a run on this computer, and prints the link to it
    python examples/lora.py LINK     # in other terminals: joins that run

Needs `pip install '.[hf]'`. The base is built here, so that the example downloads nothing; yours would be
`AutoModelForCausalLM.from_pretrained("org/name")`. It must be the same on every peer: peers compare its hash.
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from flockstep import PeerConfig, Swarm, local_run
from torch import nn
from torch.utils.data import TensorDataset

try:
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    print(f"this example needs pip install '.[hf]': {error}", file=sys.stderr)
    sys.exit(2)

RUN = """
name = "lora"
[data]
source = "own"
[inner]
optimizer = "adamw"
steps = 20
[outer]
rounds = 5
lr = 1.0
momentum = 0.0
"""
TEXT = "not lockstep: a flock makes the outer step. "


def base() -> nn.Module:
    """A tiny Llama over bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))


def adapted(model: nn.Module) -> nn.Module:
    """Add adapters of rank 8; everything else is frozen, and so neither trained nor sent."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    return get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, target_modules=targets))


def sentences(count: int, length: int = 32) -> TensorDataset:
    """Pieces of the text, as bytes."""
    text = torch.tensor(list((TEXT * (count + length)).encode()))
    return TensorDataset(torch.stack([text[i : i + length] for i in range(count)]))


def main() -> None:
    torch.set_num_threads(1)
    model = adapted(base())
    inner = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.005)
    config = PeerConfig(home=Path(tempfile.mkdtemp()), port=0)
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else local_run(RUN, Swarm.layout_of(model)) as link:
        print(f"join with: python {sys.argv[0]} '{link}'", flush=True)
        with Swarm(link, model, inner, config=config) as swarm:
            for (tokens,) in swarm.share_of(sentences(500), batch_size=8):
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                report = swarm.step(loss)
                if report.averaged:
                    print(f"round {report.round}: loss {loss.item():.3f}", flush=True)
                if swarm.finished:
                    break


if __name__ == "__main__":
    main()
