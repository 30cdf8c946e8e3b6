"""Models by name: what they need, and what they leave on disk.

    gpt         `gpt`: the built-in decoder, as nanochat and modded-nanogpt build it.
    gpt_config  The shapes of the built-in decoder `gpt`, without torch, for code that only needs sizes.
    head        The loss at the head of a language model, without keeping the logits of a large vocabulary.
    hf          Models of Hugging Face's transformers: architectures by name, and pretrained weights.
    kept        Models on disk: safetensors files, written atomically, and the parts beside a checkpoint.
    machine     Memory, disk, load and battery of this computer. One user of psutil, which does not know the limits of
                containers.
    needs       The memory and disk that a run needs, from the size of its model, and their checks. Pure.
    quantized   What bitsandbytes makes smaller on one peer: the frozen base of a LoRA run in 4 bits, AdamW's states in 8.
    registry    Models by their name in a manifest, and the loss of a batch of tokens under any of them.
"""
