"""The steps of DiLoCo on one peer: inner steps on its own batches, their pace, and the outer step on the average.

    eager          torch's optimizers without its compiler, which they load.
    examples       What a batch says of a token beside its id.
    flat           Parameters to one flat float32 vector with named tensors, and back.
    inner          The inner optimizer of a manifest: Muon on hidden matrices, AdamW on the rest, one schedule.
    micro_batches  One inner step from micro-batches of the size that suits the device.
    muon           Muon that is fast on any CPU.
    outer          The outer step: Nesterov momentum on the averaged pseudo-gradient, bit-exact.
    pace           When the inner phase ends.
    precision      The precision of the passes, and the loss scale that fp16 needs.
    ramp           How many batches make one optimizer step.
"""
