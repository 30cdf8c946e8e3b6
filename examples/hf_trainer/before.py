"""Fine-tuning with Hugging Face's Trainer, as in its course; `after.py` is the same one with others.

    python examples/hf_trainer/before.py

Needs `pip install '.[hf]'`. Model and data are made here, so that the example downloads nothing.
"""

import sys
import tempfile

import torch

try:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
except ImportError as error:
    print(f"this example needs pip install '.[hf]': {error}", file=sys.stderr)
    sys.exit(2)


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of 16 tokens; the label says whether more of them are of the upper half of the vocabulary."""
    tokens = torch.randint(1, 64, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": (row >= 32).sum().gt(8).long()} for row in tokens]


def main() -> None:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=200, learning_rate=1e-3, per_device_train_batch_size=16,
        gradient_accumulation_steps=2, warmup_steps=10, lr_scheduler_type="cosine", report_to=[], disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=sentences(2000, 1), eval_dataset=sentences(500, 0))
    trainer.train()
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
