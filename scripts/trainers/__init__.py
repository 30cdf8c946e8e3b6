"""Callbacks for the trainers of other libraries, each named after its library.

    guest         One `Swarm` inside of a loop that belongs to another library.
    lightning     `flockstep.lightning`: the callback for Lightning's Trainer.
    transformers  `flockstep.transformers`: the callback for Hugging Face's Trainer.
"""
