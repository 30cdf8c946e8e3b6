"""The Trainer of `before.py` with others: `diff before.py after.py` shows all changes.

    python examples/hf_trainer/after.py          # publishes a run on this computer, and prints the link to it
    python examples/hf_trainer/after.py LINK     # in other terminals: joins that run

Needs `pip install '.[hf]'`. Model and data are made here, so that the example downloads nothing.
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from flockstep import PeerConfig, Swarm, local_run

try:
    from flockstep.transformers import SwarmCallback
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
except ImportError as error:
    print(f"this example needs pip install '.[hf]': {error}", file=sys.stderr)
    sys.exit(2)

RUN = """
name = "hf-trainer"
[data]
source = "own"
[inner]
steps = 20                # Steps of Trainer's optimizer between two rounds.
[outer]
rounds = 5
lr = 1.0
momentum = 0.0
"""


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of 16 tokens; the label says whether more of them are of the upper half of the vocabulary."""
    tokens = torch.randint(1, 64, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": (row >= 32).sum().gt(8).long()} for row in tokens]


def classifier() -> torch.nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes))


def train(link: str) -> torch.nn.Module:
    """Train until the run is finished."""
    torch.set_num_threads(1)
    model = classifier()
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=200, learning_rate=1e-3, per_device_train_batch_size=16,
        gradient_accumulation_steps=2, warmup_steps=10, lr_scheduler_type="cosine", report_to=[], disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    swarm = SwarmCallback(link, config=PeerConfig(home=Path(tempfile.mkdtemp()), port=0))
    trainer = Trainer(
        model, args, train_dataset=sentences(2000, 1), eval_dataset=sentences(500, 0), callbacks=[swarm]
    )
    trainer.train()
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}")
    return model


def main() -> None:
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else local_run(RUN, Swarm.layout_of(classifier())) as link:
        print(f"join with: python {sys.argv[0]} '{link}'", flush=True)
        train(link)


if __name__ == "__main__":
    main()
