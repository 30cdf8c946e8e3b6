"""The trainers of other libraries as peers: real libraries, two processes each, tiny models."""

import ast
import os
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.bootstraps import kept
from support.commands import Command

EXAMPLES = Path(__file__).parents[2] / "examples"
TOGETHER = "[admission]\nmin_peers = 3\n"  # Two that train, and the owner's keeper.

TRAIN = """
import runpy, sys, zlib
model = runpy.run_path(sys.argv[1])["train"](sys.argv[2])
weights = b"".join(p.detach().numpy().tobytes() for _, p in sorted(model.named_parameters()))
print("weights", zlib.crc32(weights), flush=True)
"""
"""Trains as an example does, and prints what its weights are in the end."""


def run_of(example: Path) -> str:
    """The run that an example describes, read without what it imports."""
    for node in ast.parse(example.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="RUN")], value=ast.Constant(value=str(run))):
                return run
    raise AssertionError(f"{example} describes no run")


def trained(folder: Path, *arguments: object, code: str = TRAIN, number: int = 1) -> list[str]:
    """Run so many processes of a program, which is written to `folder`; return their outputs; none is left behind."""
    script = folder / "train.py"
    script.write_text(code)
    processes = [started(script, *arguments) for _ in range(number)]
    try:
        return [said(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


def started(script: Path, *arguments: object) -> Command:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    return Command(*map(str, arguments), program=script, stderr=subprocess.STDOUT, env=environment)


def said(process: Command) -> str:
    with process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize(
    ("example", "library"), [("hf_trainer/after.py", "transformers"), ("lightning_module.py", "lightning")]
)
def test_two_trainers_of_a_library_end_with_the_run_and_the_same_weights(
    publish: Callable[..., str], tmp_path: Path, example: str, library: str
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run = run_of(EXAMPLES / example)
    link = publish(run.replace("rounds = 5", "rounds = 3") + TOGETHER, "owner")
    with kept(link, tmp_path / "owner"):
        outputs = trained(tmp_path, EXAMPLES / example, link, number=2)
    assert len({output.split("weights ")[1] for output in outputs}) == 1, outputs
    for output in outputs:
        assert "round 3: averaged the work of 2 peers" in output
        assert "draws its samples in an order of its own" in output


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_loop_with_accelerate_trains_until_the_run_ends(publish: Callable[..., str], tmp_path: Path) -> None:
    example = EXAMPLES / "accelerate_loop.py"
    run = run_of(example).replace("rounds = 5", "rounds = 2")
    link = publish(run, "owner")
    with kept(link, tmp_path / "owner"):
        (output,) = trained(tmp_path, example, link)
    assert "after round 2: error 0." in output


RESUMED = """
import runpy, sys, tempfile
from pathlib import Path
from flockstep import PeerConfig
from flockstep.transformers import SwarmCallback
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sentences = runpy.run_path(sys.argv[1])["sentences"]
home = Path(tempfile.mkdtemp())
for max_steps in (15, 500):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    args = TrainingArguments(str(home / "out"), max_steps=max_steps, learning_rate=1e-3, bf16=True, save_steps=5,
        eval_strategy="steps", eval_steps=5, report_to=[], disable_tqdm=True, use_cpu=True)
    swarm = SwarmCallback(sys.argv[2], config=PeerConfig(home=home, host="127.0.0.1", port=0))
    trainer = Trainer(model, args, train_dataset=sentences(400, 1), eval_dataset=sentences(50, 0), callbacks=[swarm])
    trainer.train(resume_from_checkpoint=max_steps > 15)
    print("ended", trainer.state.global_step, swarm.swarm.round, swarm.swarm.reason, flush=True)
"""


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_trainer_that_ends_before_its_run_leaves_it_and_resumes(publish: Callable[..., str], tmp_path: Path) -> None:
    example = EXAMPLES / "hf_trainer" / "after.py"
    run = run_of(example).replace("rounds = 5", "rounds = 3").replace("steps = 20", "steps = 10")
    link = publish(run, "owner")
    with kept(link, tmp_path / "owner"):
        (output,) = trained(tmp_path, example, link, code=RESUMED)
    # The first one may be over before it has met the keeper: then it trained on alone, without a round.
    left = re.search(r"^ended 15 ([01]) left$", output, re.MULTILINE)
    assert left is not None, output
    # The second one resumes at Trainer's step 15, and the run's end stops it: after as many phases of 10 as rounds are left.
    assert f"ended {15 + 10 * (3 - int(left[1]))} 3 finished" in output
